"""What the functions of this package raise, each naming what it got, what it wants and the remedy.

AlgosError (a ValueError)
├── DtypeError      a tensor of the wrong dtype, or no tensor at all
├── KeywordError    a keyword that the function does not have
├── NonFiniteError  a NaN or an infinity, found by `checks.check_finite`
├── SettingError    a number outside its range, or settings that contradict each other
└── ShapeError      a tensor of the wrong rank or length
"""


class AlgosError(ValueError):
    """The root of this package's errors."""


class DtypeError(AlgosError):
    """A tensor of the wrong dtype, or something that is no tensor."""


class KeywordError(AlgosError, TypeError):
    """A keyword that the function does not have."""


class NonFiniteError(AlgosError):
    """A NaN or an infinity where a finite number is due."""


class SettingError(AlgosError):
    """A number outside its range, or settings that contradict each other."""


class ShapeError(AlgosError):
    """A tensor of the wrong rank or length."""
