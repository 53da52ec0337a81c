"""What makes one kind of processor faster. The algorithm never imports this package.

:func:`fsd_infer.backends.choose.choose` gives the :class:`fsd_infer.backends.base.Backend` of a device. A decoder asks
it once, at loading; then the backend has replaced layers, weights and functions, and nothing asks for the device again.
"""
