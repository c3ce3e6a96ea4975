"""Transfer: blocks of one engine's KV cache copied into another's, by NIXL, shared memory or TCP.

Lives here: one interface (`base`), what a *source* holds for others and for how long (`leases`, pure; `source`, its
threads), and a *puller* that fetches by whatever way is open (`puller`) with its members `shared`, `tcp` and `nixl`.
`local` is the member within one process.

Must not know: engines, requests, schedulers. A transfer is a list of blocks and a deadline.
"""
