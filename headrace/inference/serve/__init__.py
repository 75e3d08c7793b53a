"""`headrace serve`: an HTTP server for trying out a trained model; not for production."""
