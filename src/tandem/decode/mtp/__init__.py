"""MTP layers: what a model brings to predict the token after the next one, as a model by itself."""
