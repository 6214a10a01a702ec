"""How a run's own gRPC servers and channels differ from gRPC's defaults: nobody shares a port, nobody is in between."""

DIRECT = (
    # Else Linux lets any process of the same user listen at a port that is taken, and deals the callers out to both.
    ("grpc.so_reuseport", 0),
    # http_proxy and its like are set for the outside world: a proxy would be shown the token, or refuse to connect.
    ("grpc.enable_http_proxy", 0),
)
