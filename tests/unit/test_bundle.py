"""What a host needs of a node, as Ray names it."""

from __future__ import annotations

from engine.run.hosts.bundle import Bundle, what_is_free


def test_a_host_is_on_its_node_while_that_can_be_used() -> None:
    bundle = Bundle(host="b", cores=2, node="n1", label=("zone", "x"))
    there = {"zone": "x", "ray.io/node-id": "n1"}
    assert bundle.selector({"n1", "n2"}, []) == there
    assert bundle.selector({"n1", "n2"}, ["n2"]) == there
    assert bundle.selector({"n2"}, []) == {"zone": "x"}, "it is gone: any node of the zone"
    lost = bundle.selector({"n1", "n2"}, ["n1", "n3"])
    assert lost == {"zone": "x", "ray.io/node-id": "!in(n1,n3)"}, "a host was lost on it"


def test_the_kind_of_its_gpus_is_a_resource() -> None:
    bundle = Bundle(host="b", cores=1, gpus=2, label=("gpu", "H200"))
    assert bundle.resources == {"CPU": 1.0, "GPU": 2.0, "accelerator_type:H200": 0.001}
    assert bundle.selector({"n1"}, []) == {}
    assert bundle.fits({"CPU": 1.0, "GPU": 2.0, "accelerator_type:H200": 1.0})
    assert not bundle.fits({"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0})
    assert not bundle.fits({"CPU": 8.0, "GPU": 1.0, "accelerator_type:H200": 1.0})
    assert str(bundle) == "b (1 CPU, 2 GPU)"


def test_what_a_node_has_free() -> None:
    assert what_is_free({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.5}) == "1.5 of 4 CPU, 0 of 1 GPU free"
    assert what_is_free({"memory": 1e9}, {}) == "0 of 0 CPU free", "it has no cores"
