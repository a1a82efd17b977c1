"""MTP layers, which predict the token after the next one; each is loaded as a separate model."""
