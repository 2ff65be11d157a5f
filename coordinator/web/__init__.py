"""The live page: what a browser sees of the service, over plain HTTP beside gRPC.

`page` puts the parts together, `server` has the port, `app` the routes, `guard` who may ask, `feed` what watchers hear,
`messages` and `questions` the JSON, `assets` the files of the page. Imported only when an HTTP port is configured.
"""
