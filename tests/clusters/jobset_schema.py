"""The part of the JobSet API (v1alpha2) and of Kubernetes' jobs and pods that clusters/ uses.

A field that the API does not have, a missing one, and a value of another type are errors. The names
are those of https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and of
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """A model that converts nothing and allows no further fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


# -- pods ------------------------------------------------------------------------------------------


class FieldRef(Strict):
    fieldPath: Annotated[str, Field(pattern=r"^metadata\.(annotations|labels)\['[^']+'\]$")]


class SecretKeyRef(Strict):
    name: Name
    key: str
    optional: bool = False


class EnvSource(Strict):
    fieldRef: FieldRef | None = None
    secretKeyRef: SecretKeyRef | None = None


class EnvVar(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    valueFrom: EnvSource | None = None

    @model_validator(mode="after")
    def has_one_value(self) -> "EnvVar":
        assert (self.value is None) != (self.valueFrom is None)
        return self


class Port(Strict):
    containerPort: Annotated[int, Field(gt=0, lt=65536)]


class Resources(Strict):
    limits: dict[Literal["nvidia.com/gpu", "google.com/tpu"], Positive]


class VolumeMount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern="^/")]


class Container(Strict):
    name: Name
    image: str
    args: list[str]
    env: list[EnvVar]
    ports: list[Port] = []
    resources: Resources
    volumeMounts: list[VolumeMount]


class Claim(Strict):
    claimName: Name


class EmptyDir(Strict):
    medium: Literal["", "Memory"]


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None


class Toleration(Strict):
    key: str
    operator: Literal["Exists", "Equal"]
    value: str | None = None
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"]


class SecurityContext(Strict):
    runAsNonRoot: bool
    runAsUser: Count
    runAsGroup: Count
    fsGroup: Count


class PodSpec(Strict):
    restartPolicy: Literal["Never"]  # what podFailurePolicy demands
    terminationGracePeriodSeconds: Count
    nodeSelector: dict[str, str]
    tolerations: list[Toleration]
    securityContext: SecurityContext
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(Strict):
    spec: PodSpec


# -- jobs ------------------------------------------------------------------------------------------


class OnExitCodes(Strict):
    containerName: Name
    operator: Literal["In", "NotIn"]
    values: list[int]


class OnPodCondition(Strict):
    type: str
    status: Literal["True", "False", "Unknown"]


class PodFailureRule(Strict):
    action: Literal["FailJob", "FailIndex", "Ignore", "Count"]
    onExitCodes: OnExitCodes | None = None
    onPodConditions: list[OnPodCondition] | None = None

    @model_validator(mode="after")
    def has_one_condition(self) -> "PodFailureRule":
        assert (self.onExitCodes is None) != (self.onPodConditions is None)
        return self


class PodFailurePolicy(Strict):
    rules: list[PodFailureRule]


class JobSpec(Strict):
    completionMode: Literal["Indexed"]  # gives the pods numbers and host names
    completions: Positive
    parallelism: Positive
    backoffLimit: Count
    podFailurePolicy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(Strict):
    spec: JobSpec


# -- the set ---------------------------------------------------------------------------------------


class ReplicatedJob(Strict):
    name: Name
    replicas: Positive
    template: JobTemplate


class Network(Strict):
    enableDNSHostnames: bool
    publishNotReadyAddresses: bool


class Coordinator(Strict):
    replicatedJob: Name
    jobIndex: Count
    podIndex: Count


class FailureRule(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    onJobFailureReasons: list[
        Literal[
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    ]


class FailurePolicy(Strict):
    maxRestarts: Count
    rules: list[FailureRule]


class SuccessPolicy(Strict):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[Name]


class JobSetSpec(Strict):
    network: Network | None = None
    coordinator: Coordinator | None = None
    successPolicy: SuccessPolicy | None = None
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


class Metadata(Strict):
    name: Name
    annotations: dict[str, str] = {}


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec
