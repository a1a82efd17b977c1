"""Computes a MoE layer's experts: on the CPU, or on two processors by a plan."""
