"""Tandem: Mixture-of-Experts models on one GPU that is too small for them, CPU and GPU together."""
