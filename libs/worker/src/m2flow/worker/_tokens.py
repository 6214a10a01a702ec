"""What a gRPC service of this package asks of every call: its token, before the call takes a thread."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from m2flow.comm.token import TOKEN_KEY, check_token, same_token

_log = logging.getLogger(__name__)


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses and logs each call that does not bring the token as the metadata `m2flow-token`.

    Its first message is not waited for: strangers who send none would occupy all threads. Raises ValueError for an
    empty token.
    """

    def __init__(self, token: str) -> None:
        self._token = check_token(token)
        # A stream's handler is called before anything has come.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call."""
        brought = str(dict(details.invocation_metadata or ()).get(TOKEN_KEY, ""))
        return continuation(details) if same_token(brought, self._token) else self._refusal


def _refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
    _log.warning("refused a call of %s: its token is not this service's", context.peer())
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED, f"got another token than this service's, want it as the metadata {TOKEN_KEY!r}"
    )
