"""Quality per byte: the judge, Tandem's formats and llama.cpp's on the same weights and text."""
