"""Computes a MoE layer's experts: on the CPU, or on CPU and device by a plan."""
