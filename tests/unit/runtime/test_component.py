"""Names: the older way leads to the same endpoint."""

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.runtime import DistributedRuntime


async def test_the_older_way_leads_to_the_same_endpoint() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    component = runtime.namespace("ns").component("comp")
    await component.create_service()
    assert component.endpoint("ep").id == runtime.endpoint("dyn://ns.comp.ep").id
    assert (str(runtime.namespace("ns")), str(component)) == ("ns", "ns.comp")
    await runtime.shutdown()


@pytest.mark.parametrize("name", ["", "a.b", "a/b"])
async def test_each_name_is_one_part(name: str) -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    with pytest.raises(InvalidArgument):
        runtime.namespace(name)
    with pytest.raises(InvalidArgument):
        runtime.namespace("ns").component(name)
    with pytest.raises(InvalidArgument):
        runtime.namespace("ns").component("comp").endpoint(name)
    await runtime.shutdown()
