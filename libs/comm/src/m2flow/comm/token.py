"""The secret of a run or a service: whoever brings it is answered, so nobody may have an empty one.

It travels in messages and as gRPC metadata, and its comparison takes as long whatever is brought.
"""

import hmac

TOKEN_KEY = "m2flow-token"


def check_token(token: str) -> str:
    """Returns a token; raises ValueError unless it is printable ASCII, as metadata must be, and not empty."""
    if not token or not (token.isascii() and token.isprintable()):
        found = "a token that is not printable ASCII" if token else "an empty token"
        raise ValueError(f"got {found}, want a secret such as secrets.token_hex(16): whoever knows it is answered")
    return token


def same_token(brought: str, token: str) -> bool:
    """Says whether a token that a stranger brings is the one that is asked for."""
    return hmac.compare_digest(brought.encode("utf-8", "surrogatepass"), token.encode())
