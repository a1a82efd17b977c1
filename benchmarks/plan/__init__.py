"""Whether what `tandem plan` says is what happens: configurations that a seed draws."""
