"""Connects the official client: in the cluster with the pod's service account, outside with a kubeconfig file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from exporters.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

#: More than the watches that are open at once.
POOL_SIZE: Final = 16


def connect(kubeconfig: Path | str | None = None, context: str | None = None) -> ApiClient:
    """Return a client for the cluster that ``kubeconfig`` and its ``context`` name.

    Without both, the service account is used where there is one, else ``$KUBECONFIG`` or ``~/.kube/config``.

    Raises:
        NotFoundError: there is neither a service account nor a kubeconfig file.
        InvalidInputError: the file is malformed, or has no such context.
    """
    import urllib3
    from kubernetes import config
    from kubernetes.client import ApiClient, Configuration

    settings = Configuration()
    if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise NotFoundError(
                f"the service account cannot be read: {_line(error)}",
                cure="mount it (automountServiceAccountToken), or give --kubeconfig",
            ) from None
    else:
        _load_file(kubeconfig, context, settings)
    settings.connection_pool_maxsize = POOL_SIZE
    # Retries are the reflectors' own, with back-off and jitter.
    settings.retries = urllib3.Retry(0)
    return ApiClient(settings)


def _load_file(kubeconfig: Path | str | None, context: str | None, settings: object) -> None:
    import yaml
    from kubernetes import config

    if kubeconfig is not None and not Path(kubeconfig).is_file():
        raise NotFoundError(f"kubeconfig {kubeconfig} does not exist", cure="give --kubeconfig the path of a file")
    name = f"kubeconfig {kubeconfig}" if kubeconfig is not None else "kubeconfig"
    try:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=None if kubeconfig is None else str(kubeconfig),
            context=context,
            client_configuration=settings,
            persist_config=False,
        )
    except config.ConfigException as error:
        text = _line(error)
        if kubeconfig is None and "no configuration found" in text.lower():
            raise NotFoundError(
                "there is no kubeconfig and no service account",
                cure="run it in the cluster, or give --kubeconfig",
            ) from None
        raise InvalidInputError(f"{name}: {text}", cure="check it with `kubectl config view`") from None
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{name} is not valid: {_line(error)}", cure="check it with kubectl") from None
    except OSError as error:
        raise InvalidInputError(f"{name} cannot be read: {error.strerror}", cure="check its permissions") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
