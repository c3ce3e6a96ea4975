"""Contact: reachability of etcd, the duration of outages, and one log line for each."""

import asyncio
import contextlib
import logging
import ssl

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions
from dynamo.runtime.transports.etcd.protocol import EtcdRefused

logger = logging.getLogger(__name__)

REMIND_S = 10.0  # Log interval while waiting for the first response.


class Contact:
    """State of the connection to etcd: failures before its first response are startup errors, later ones outages."""

    def __init__(self, options: EtcdOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._began_at = self._reminded_at = clock.now()
        self._lost_at: float | None = None
        self._faults: dict[Address, ConfigError] = {}
        self._is_settled = asyncio.Event()
        self.has_met = False
        """Whether etcd has ever responded, reachable now or not."""
        self.why = "no response yet"
        """Last error."""

    @property
    def names(self) -> str:
        return ",".join(map(str, self._options.addresses))

    async def wait(self) -> None:
        """Wait for the first response. Raise `ConfigError` after the startup timeout."""
        if self.has_met:
            return
        timeout_s = self._options.startup_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._began_at + timeout_s - self._clock.now())):
                await self._is_settled.wait()
        for fault in self._faults.values():
            raise fault
        if not self.has_met:
            raise ConfigError(
                f"ETCD_ENDPOINTS={self.names}: no response from etcd within {timeout_s:g} s "
                f"(ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS): {self.why}"
            )

    def met(self, how: str) -> None:
        """Record a response of a member; `how` describes the recovery after an outage."""
        if self._lost_at is not None:
            logger.warning("etcd reachable again after %.1f s: %s", self._clock.now() - self._lost_at, how)
        self._lost_at = None
        self._faults.clear()
        self.has_met = True
        self._is_settled.set()

    def lost(self, address: Address, error: Exception) -> None:
        """Record the failure of a member."""
        self.why = f"{address}: {error}"
        if not self.has_met:
            self._note(address, error)
        elif self._lost_at is None:
            self._lost_at = self._clock.now()
            logger.warning("etcd unreachable (%s): keeping the last view", self.why)

    def _note(self, address: Address, error: Exception) -> None:
        """End the wait once every member has failed with a configuration error."""
        fault = fault_of(address, error)
        if fault is not None:
            self._faults[address] = fault
        else:
            self._faults.clear()
        if len(self._faults) == len(set(self._options.addresses)):
            self._is_settled.set()
        else:
            self._is_settled.clear()
        now = self._clock.now()
        if now >= self._reminded_at:
            self._reminded_at = now + REMIND_S
            limit_s = self._options.startup_timeout_s
            logger.warning("waiting for etcd (ETCD_ENDPOINTS), at most %g s: %s", limit_s, self.why)


def fault_of(address: Address, error: Exception) -> ConfigError | None:
    """Return the configuration error behind a failure, None for a failure that may be temporary."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConfigError(f"ETCD_AUTH_CA: certificate of {address} is not trusted: {error.verify_message}")
    if isinstance(error, EtcdRefused):
        return ConfigError(f"ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: rejected by {address}: {error}")
    return None
