"""The interface to Transformers: config, quantizer, experts function, loading and saving.

Importing this package loads Transformers, which makes `tandem.registration` register Tandem there.
So Tandem is registered before a module of this package is used, in whatever order a user imports.
"""

import transformers.quantizers.auto  # noqa: F401
