"""``--dev`` with the folder of a cluster that is gone says so, and does not stand there doing nothing."""

from pathlib import Path

import pytest

from app.dev import NotBroughtUp, check_folder
from app.kube import paths
from app.kube.client import Kube
from app.kube.installation import INSTALLATION_SECRET
from app.settings import Settings
from app.store.engine import begin, create_engine
from app.store.installation import get_or_create
from hack.cluster import Cluster


async def test_a_folder_of_another_clusters_installation_is_refused_by_name(
    cluster: Cluster, system: str, database_url: str, tmp_path: Path
) -> None:
    settings = Settings(dev=True, dev_dir=str(tmp_path), database_url=database_url, namespace=system)
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as kube:
        await check_folder(kube, settings)  # nobody's yet

        engine = create_engine(database_url)
        async with begin(engine) as conn:
            await get_or_create(conn, new_id="aaaaaaaaaa")
        await engine.dispose()
        with pytest.raises(NotBroughtUp, match=f"delete {tmp_path}"):
            await check_folder(kube, settings)

        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": INSTALLATION_SECRET},
            "stringData": {"id": "aaaaaaaaaa"},
        }
        await kube.create(paths.secrets(system), body)
        await check_folder(kube, settings)
