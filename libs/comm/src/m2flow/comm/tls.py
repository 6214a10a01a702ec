"""Files for mutual TLS between hosts."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tls:
    """This end's certificate and key, and the authority that must have signed the other end's certificate."""

    certificate: Path
    key: Path
    authority: Path
