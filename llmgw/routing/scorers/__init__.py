"""What a request costs on an endpoint, in seconds: one file, one scorer. Weights are the profile's."""
