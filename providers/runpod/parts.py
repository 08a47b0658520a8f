"""What stands in the account besides pods: the template that proves the account, and registry logins.

RunPod names no account anywhere in REST v2. So there is one template of ours, which is never used for a pod:
its id stands for the account, and an answer in which it is missing is not our account's. Registry logins are
made once for each content and shared by pods; the installation and a hash of the login are their names.
"""

import hashlib

from providers.base import Ref, RegistryLogin, ResourceId, Unavailable
from providers.capabilities import Dropped, Part, PartKind, PartRound
from providers.runpod.calls import call, parsed, read, usable
from providers.runpod.client import Reply, RunPodClient
from providers.runpod.wire import Registries, Registry, Template, Templates

_HASH_CHARS = 16
_IN_USE = ("in use", "is used", "being used")


class Parts:
    """``proven`` is the account's id as it was last shown; None until then."""

    def __init__(self, client: RunPodClient, *, provider: str, account: str, installation: str) -> None:
        self._client = client
        self._provider, self._account = provider, account
        self._installation = installation
        self.proven: str | None = None

    @property
    def marker(self) -> str:
        """The name of the template that stands for the account."""
        return f"nb-{self._installation}-account"

    async def proof(self, *, make: bool) -> str | None:
        """The account's id. None when the answer does not show our template, and we must not make it.

        Several of that name, made by replicas that began together: the least id counts, for all alike.

        Raises:
            Unavailable, Throttled: it cannot be told.
        """
        found = await self._markers()
        if not found and make:
            # It starts nothing by itself. Both switches are on where a template does not say otherwise.
            body = {"name": self.marker, "image": "busybox", "startSsh": False, "startJupyter": False}
            usable(await call(self._client, "POST", "/templates", body=body))
            found = await self._markers()
            if not found:
                raise Unavailable("the template that stands for the account was made, and is not shown yet")
        self.proven = min(found) if found else None
        return self.proven

    async def login(self, login: RegistryLogin) -> str:
        """The id of a registry login with this content, made if there is none. May be repeated.

        Raises:
            Unavailable, Throttled: ask again.
        """
        name = self._login_name(login)
        if (found := await self._login_named(name)) is not None:
            return found
        body = {"name": name, "username": login.username, "password": login.password}
        reply = await call(self._client, "POST", "/registries", body=body)
        if reply.ok:
            return parsed(Registry, reply).id
        if (found := await self._login_named(name)) is not None:  # somebody else was faster
            return found
        raise _unsaid(reply, login.password)

    async def round(self) -> PartRound:
        """Every template and registry login of the account.

        Raises:
            Unavailable, Throttled: nothing is known.
        """
        templates = parsed(Templates, await read(self._client, "/templates")).templates
        registries = parsed(Registries, await read(self._client, "/registries")).registries
        markers = [each.id for each in templates if each.name == self.marker]
        parts = [self._part(PartKind.TEMPLATE, each, in_use=each.id in markers or None) for each in templates]
        parts += [self._part(PartKind.REGISTRY_LOGIN, each, in_use=None) for each in registries]
        return PartRound(
            region="",
            account_id=min(markers) if markers else None,
            parts=tuple(parts),
            unknown=None if markers else "the template that stands for our account is not shown",
            calls=2,
        )

    async def drop(self, part: Part) -> Dropped:
        """Raises:
        Unavailable, Throttled: ask again.
        """
        kinds = {PartKind.TEMPLATE: "templates", PartKind.REGISTRY_LOGIN: "registries"}
        if part.kind not in kinds:
            raise Unavailable(f"a {part.kind} is nothing that we make on RunPod")
        reply = await call(self._client, "DELETE", f"/{kinds[part.kind]}/{part.ref.resource_id}")
        if reply.status == 404 and reply.problem is not None:
            return Dropped.NOT_FOUND
        if reply.status in (400, 409) and any(text in (reply.problem or "").lower() for text in _IN_USE):
            return Dropped.IN_USE
        usable(reply)
        return Dropped.ACCEPTED

    async def _markers(self) -> list[str]:
        shown = parsed(Templates, await read(self._client, "/templates"))
        return [each.id for each in shown.templates if each.name == self.marker]

    async def _login_named(self, name: str) -> str | None:
        shown = parsed(Registries, await read(self._client, "/registries"))
        return min((each.id for each in shown.registries if each.name == name), default=None)

    def _login_name(self, login: RegistryLogin) -> str:
        content = f"{login.username}\0{login.password}".encode()
        return f"nb-{self._installation}-login-{hashlib.sha256(content).hexdigest()[:_HASH_CHARS]}"

    def _part(self, kind: PartKind, shown: Template | Registry, *, in_use: bool | None) -> Part:
        ref = Ref(provider=self._provider, account=self._account, region="", resource_id=ResourceId(shown.id))
        return Part(ref=ref, kind=kind, identity=shown.name or None, in_use=in_use)


def _unsaid(reply: Reply, secret: str) -> Exception:
    """The failure, without the password if the answer quotes it."""
    try:
        usable(reply)
    except Exception as error:
        if secret and secret in str(error):
            return Unavailable(f"the registry login was refused with {reply.status}")
        return error
    return Unavailable("the registry login was answered in a way that cannot be read")
