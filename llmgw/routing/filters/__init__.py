"""Which endpoints may serve a request: one file, one filter. Order and selection are the profile's."""
