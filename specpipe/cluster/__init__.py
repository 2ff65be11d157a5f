"""The whole service on a Ray cluster: groups of actors that start, hold and end the processes of the service.

Ray places and restarts; the data path stays gRPC between the processes themselves. `config` and `reading` are what is
asked for, `plan` what it comes to (pure), `keeper` one actor's work, `replica` one worker or coordinator through its
restarts, `service` all of them, `autoscale` how many there should be (pure), `load` what that is decided by, `leaving`
the end of what runs on a node that is taken away. Only `on_ray` imports Ray, which is an extra.
Must not know: torch, protobuf, what the processes do.
"""
