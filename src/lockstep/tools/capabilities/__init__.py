"""Which verbs work on which backend and device: measured by running every one of them."""
