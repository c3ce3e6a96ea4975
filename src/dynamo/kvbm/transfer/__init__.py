"""Transfer: copies blocks of one engine's KV cache into another's, by NIXL, shared memory or TCP.

Contents: one interface (`base`), the leases of a *source* (`leases`, pure) and its threads (`source`), and a *puller* that
selects a transport (`puller`) from its members `shared`, `tcp` and `nixl`. `local` is the member within one process.

The package has no notion of engines, requests or schedulers. A transfer is a list of blocks and a deadline.
"""
