"""The registry plane: attach, watermark acks, health. The only gRPC files of the library.

`server.serve()` and `server.TransferControlServicer` serve it, `client.TransferControlClient` calls it; `status` maps errors,
`convert` maps values. Import the modules: this package imports nothing, so that the core stays free of gRPC.
"""
