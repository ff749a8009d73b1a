"""A stopped step of an image build: nobody starts it or looks into it while the host reads its disk."""

from lab.daemon import DaemonProcess, Failed


def test_a_stopped_step_of_a_build_is_not_started(daemon: DaemonProcess) -> None:
    box = daemon.create(labels={"atoll.build": "x"}, persistent=True)
    try:
        daemon.post(f"/v1/sandboxes/{box.id}/stop")
        for path, fields in (
            (f"/v1/sandboxes/{box.id}/start", {}),
            (f"/v1/sandboxes/{box.id}/snapshots", {"name": "s"}),
        ):
            try:
                daemon.post(path, fields)
            except Failed as failed:
                assert failed.code == "failed_precondition" and "image build" in str(failed.error), path
            else:
                raise AssertionError(f"{path} was done")
    finally:
        box.destroy()
