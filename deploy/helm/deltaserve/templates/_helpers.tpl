{{- define "deltaserve.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* What selects the pods of this release. */}}
{{- define "deltaserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "deltaserve.labels" -}}
{{ include "deltaserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "deltaserve.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}

{{/* What the model is called in the API. */}}
{{- define "deltaserve.servedName" -}}
{{ .Values.model.servedName | default .Release.Name }}
{{- end }}

{{- define "deltaserve.modelPath" -}}
{{- if .Values.model.file -}}
/model/{{ .Values.model.file }}
{{- else -}}
/model
{{- end -}}
{{- end }}

{{/* What prefill, decode and router are all started with. */}}
{{- define "deltaserve.sharedArgs" -}}
- {{ include "deltaserve.modelPath" . }}
- --host
- 0.0.0.0
- --cluster-key-file
- /etc/deltaserve/cluster/cluster.key
- --log-format
- json
{{- with .Values.args }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where containers may write: nothing there outlives the pod. Triton keeps compiled kernels below HOME. */}}
{{- define "deltaserve.writableMounts" -}}
- name: scratch
  mountPath: /tmp
{{- end }}

{{- define "deltaserve.sharedMounts" -}}
- name: model
  mountPath: /model
  readOnly: true
  {{- with .Values.model.subPath }}
  subPath: {{ . }}
  {{- end }}
- name: cluster-key
  mountPath: /etc/deltaserve/cluster
  readOnly: true
{{ include "deltaserve.writableMounts" . }}
{{- end }}

{{- define "deltaserve.sharedVolumes" -}}
- name: model
  {{- if not .Values.model.volume }}
  {{- fail "model.volume: where is the model? A volume source, such as {persistentVolumeClaim: {claimName: models, readOnly: true}}" }}
  {{- end }}
  {{- toYaml .Values.model.volume | nindent 2 }}
- name: cluster-key
  secret:
    secretName: {{ .Values.clusterKey.secretName | default (printf "%s-cluster-key" (include "deltaserve.fullname" .)) }}
    defaultMode: 0400
    items:
      - key: {{ .Values.clusterKey.key }}
        path: cluster.key
- name: scratch
  emptyDir: {}
{{- end }}

{{/* Where pods may run, and what else is said of them. Called with {root, part}. */}}
{{- define "deltaserve.podFields" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ add .part.preStopSeconds .part.shutdownGraceSeconds 10 }}
{{- end }}

{{/* The container, apart from its arguments, ports and probes. Called with {root, part}. */}}
{{- define "deltaserve.containerFields" -}}
image: {{ include "deltaserve.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
{{- with .part.preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ . | quote }}]
{{- end }}
{{- end }}

{{/* The headless service by which routers find one role's workers, whatever makes their pods: it selects by labels that
the chart gives them, never by names. Called with {root, part, role}. */}}
{{- define "deltaserve.workerService" -}}
{{- $name := printf "%s-%s" (include "deltaserve.fullname" .root) .role -}}
{{- $values := .root.Values -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "deltaserve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
spec:
  # Each address behind this name is a worker that listens. One that starts is not there yet, one that is told to end is
  # gone at once, so that routers let it go before it does; with publishNotReadyAddresses both would be listed.
  clusterIP: None
  publishNotReadyAddresses: false
  ipFamilies: [IPv4]
  ipFamilyPolicy: SingleStack
  selector:
    {{- include "deltaserve.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
  ports:
    - name: links
      port: {{ $values.links.port }}
      targetPort: links
    {{- if $values.kvEvents.enabled }}
    - name: kv-events
      port: {{ $values.kvEvents.port }}
      targetPort: kv-events
    - name: kv-replay
      port: {{ $values.kvEvents.replayPort }}
      targetPort: kv-replay
    {{- end }}
{{- end }}

{{/* Workers whose ranks are all in one pod. */}}
{{- define "deltaserve.workersOfOne" -}}
{{- $name := printf "%s-%s" (include "deltaserve.fullname" .root) .role -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "deltaserve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
spec:
  serviceName: {{ $name }}
  replicas: {{ .part.replicas }}
  podManagementPolicy: Parallel # they do not wait for each other
  minReadySeconds: {{ .part.minReadySeconds }}
  selector:
    matchLabels:
      {{- include "deltaserve.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .role }}
  template:
    {{- include "deltaserve.workerPod" (dict "root" .root "part" .part "role" .role "component" .role) | nindent 4 }}
{{- end }}

{{/* Workers whose ranks are in a pod of each of several nodes: groups of github.com/kubernetes-sigs/lws, which gives
every container LWS_GROUP_SIZE, LWS_WORKER_INDEX (0: the leader) and LWS_LEADER_ADDRESS (its pkg/utils/pod/pod_utils.go).
That is a name below the headless service that it makes, with the set's own name, for pods that are not ready too
(pkg/utils/controller/controller_utils.go): node 0 is not until the others have found it. Were a service of that name
there already, such as the workers' own, it would make none. */}}
{{- define "deltaserve.workersOfNodes" -}}
{{- $name := printf "%s-%s-nodes" (include "deltaserve.fullname" .root) .role -}}
{{- if gt (len $name) 49 }}{{/* its StatefulSets add a number to it, and names of these are at most 52 long */}}
{{- fail (printf "%s.nodes %v: the name %s has %d characters, 49 at most are usable; shorten the release's" .role .part.nodes $name (len $name)) }}
{{- end -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "deltaserve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
spec:
  {{- include "deltaserve.groups" . | nindent 2 }}
{{- end }}

{{/* The spec of a LeaderWorkerSet, of which each group is a worker. Called with {root, part, role}. */}}
{{- define "deltaserve.groups" -}}
{{- include "deltaserve.checkNodes" . -}}
{{- $worker := dict "root" .root "part" .part "role" .role "component" .role -}}
replicas: {{ .part.replicas }}
startupPolicy: LeaderCreated # node 0 is ready when all others have loaded their parts
leaderWorkerTemplate:
  size: {{ .part.nodes }}
  # Nodes that miss another find each other again by themselves: node 0 ends, and the kubelet starts its container
  # again; further nodes end their ranks and join it anew. To delete the group's pods for that would take longer.
  restartPolicy: None
  {{- if gt (int .part.nodes) 1 }}
  {{- $further := set (deepCopy .part) "preStopSeconds" 0 }}{{/* it drains nothing */}}
  leaderTemplate:
    {{- include "deltaserve.workerPod" $worker | nindent 4 }}
  workerTemplate:
    {{- include "deltaserve.workerPod" (dict "root" .root "part" $further "role" .role "component" (printf "%s-node" .role)) | nindent 4 }}
  {{- else }}
  workerTemplate: # of the leader too, which is the whole group
    {{- include "deltaserve.workerPod" $worker | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Prefill and decode as roles of one object of github.com/kubernetes-sigs/lws, 0.9 or newer. For each role and each
revision of the pods its controller makes a LeaderWorkerSet NAME-0-REVISION-ROLE (its pkg/utils/disaggregatedset/
utils.go); the pods keep the chart's labels beside those that it adds (pkg/controllers/disaggregatedset/
lws_manager.go), so the services, budgets and policies of the chart find them. The services that it makes itself have
the revision in their names, and newer ones make none: nothing uses them. */}}
{{- define "deltaserve.disaggregatedSet" -}}
{{- $name := include "deltaserve.fullname" . -}}
{{- $rollout := .Values.disaggregatedSet -}}
{{- include "deltaserve.checkDisaggregatedSet" (dict "values" .Values "name" $name) -}}
apiVersion: disaggregatedset.x-k8s.io/v1
kind: DisaggregatedSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "deltaserve.labels" . | nindent 4 }}
spec:
  roles:
    {{- range $role := list "prefill" "decode" }}
    - name: {{ $role }}
      spec:
        rolloutStrategy: # left out, the controller would take a surge of 1, for which clusters need spare GPUs
          type: RollingUpdate
          rollingUpdateConfiguration:
            maxSurge: {{ $rollout.maxSurge }}
            maxUnavailable: {{ $rollout.maxUnavailable }}
        {{- include "deltaserve.groups" (dict "root" $ "part" (index $.Values $role) "role" $role) | nindent 8 }}
    {{- end }}
{{- end }}

{{/* What a DisaggregatedSet cannot be told: its webhook and its CRD would refuse it, or its pods. Called with {values,
name}. */}}
{{- define "deltaserve.checkDisaggregatedSet" -}}
{{- $prefill := int .values.prefill.replicas -}}
{{- $decode := int .values.decode.replicas -}}
{{- if and (or $prefill $decode) (not (and $prefill $decode)) }}
{{- fail (printf "disaggregatedSet.enabled with prefill.replicas %d and decode.replicas %d: either both roles have workers or neither has" $prefill $decode) }}
{{- end }}
{{- if not (or (int .values.disaggregatedSet.maxSurge) (int .values.disaggregatedSet.maxUnavailable)) }}
{{- fail "disaggregatedSet.maxSurge and disaggregatedSet.maxUnavailable are both 0: a rollout could replace no worker" }}
{{- end }}
{{- if gt (len .name) 30 }}{{/* 19 more name a LeaderWorkerSet, 3 more the StatefulSet of a group, of 52 at most */}}
{{- fail (printf "disaggregatedSet.enabled: the name %s has %d characters, 30 at most are usable; shorten the release's" .name (len .name)) }}
{{- end }}
{{- end }}

{{/* What workers on several nodes cannot be told. Called with {root, part, role}. */}}
{{- define "deltaserve.checkNodes" -}}
{{- $nodes := int .part.nodes -}}
{{- if gt $nodes 1 }}
{{- if mod (int .part.tpSize) $nodes }}
{{- fail (printf "%s.nodes %d: must divide %s.tpSize, %v ranks, which are shared out equally" .role $nodes .role .part.tpSize) }}
{{- end }}
{{- if eq .root.Values.device "cuda" }}
{{- fail (printf "%s.nodes %d with device cuda: ranks on GPUs are on one node; leave nodes at 1, or take device cpu" .role $nodes) }}
{{- end }}
{{- if .root.Values.transfers.network }}
{{- fail (printf "%s.nodes %d: nodes find each other at their pods' own addresses; leave transfers.network out" .role $nodes) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What a worker tells routers of others, and where, as its flag takes it: JSON. */}}
{{- define "deltaserve.kvEvents" -}}
{{- $events := .Values.kvEvents -}}
{{- if and .Values.networkPolicy.enabled (not $events.from) }}
{{- fail "kvEvents.enabled: kvEvents.from lets nobody in; name where the router runs, such as [{podSelector: {matchLabels: {app: picker}}}]" }}
{{- end }}
{{- $topic := $events.topic | default (printf "kv@$(POD_IP)@%s" (include "deltaserve.servedName" .)) -}}
{{- dict "topic" $topic
    "endpoint" (printf "tcp://$(POD_IP):%v" $events.port)
    "replay_endpoint" (printf "tcp://$(POD_IP):%v" $events.replayPort) | toJson }}
{{- end }}

{{/* The pod of a worker, or of a further node of one: that has ranks and pages, and no port that anybody could be
told of. Called with {root, part, role, component}: where component is not the role it is a further node. */}}
{{- define "deltaserve.workerPod" -}}
{{- $values := .root.Values -}}
{{- $isCuda := eq $values.device "cuda" -}}
{{- $isWorker := eq .component .role -}}
{{- $nodes := int .part.nodes -}}
metadata:
  labels:
    {{- include "deltaserve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- if and $isWorker $values.llmd.enabled }}
    llm-d.ai/role: {{ .role }}
    {{- end }}
    {{- with .part.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .part.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "deltaserve.podFields" . | nindent 2 }}
  containers:
    - name: {{ .role }}
      {{- include "deltaserve.containerFields" . | nindent 6 }}
      args:
        - {{ .role }}
        {{- include "deltaserve.sharedArgs" .root | nindent 8 }}
        - --device
        - {{ $values.device }}
        - --tp-size
        - {{ .part.tpSize | quote }}
        - --advertise
        - $(POD_IP)
        - --disaggregation-bootstrap-port
        - {{ $values.links.port | quote }}
        - --trusted-data-network
        - {{ $values.transfers.network | default "$(POD_IP)/32" }}
        - --shutdown-grace-s
        - {{ .part.shutdownGraceSeconds | quote }}
        {{- if gt $nodes 1 }}
        - --nnodes
        - $(LWS_GROUP_SIZE)
        - --node-rank
        - $(LWS_WORKER_INDEX)
        - --dist-init-addr
        - $(LWS_LEADER_ADDRESS):{{ $values.nodes.port }}
        {{- end }}
        {{- if and $isWorker $values.kvEvents.enabled }}
        - --kv-events-config
        - {{ include "deltaserve.kvEvents" .root | quote }}
        {{- end }}
        {{- with .part.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: HOME
          value: /tmp
        - name: UCX_TCP_PORT_RANGE # where page transfers listen: the NetworkPolicy names the same ports
          value: {{ printf "%v-%v" $values.transfers.firstPort $values.transfers.lastPort }}
        {{- with .part.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $isWorker }}
      ports:
        - name: links
          containerPort: {{ $values.links.port }}
        {{- if $values.kvEvents.enabled }}
        - name: kv-events
          containerPort: {{ $values.kvEvents.port }}
        - name: kv-replay
          containerPort: {{ $values.kvEvents.replayPort }}
        {{- end }}
      # A worker listens once all of its ranks have loaded. It ends by itself when it stands still (exit codes 70 to 74),
      # so there is no livenessProbe: there is nothing that one could find out first.
      startupProbe:
        tcpSocket: {port: links}
        periodSeconds: 5
        failureThreshold: {{ div (add .part.startSeconds 4) 5 }}
      readinessProbe:
        tcpSocket: {port: links}
        periodSeconds: 5
        failureThreshold: 3
      {{- end }}
      resources:
        {{- $asked := .part.resources | default dict | deepCopy }}
        {{- if $isCuda }}
        {{- $asked = mustMergeOverwrite $asked (dict "limits" (dict $values.gpuResource .part.tpSize)) }}
        {{- end }}
        {{- toYaml $asked | nindent 8 }}
      volumeMounts:
        {{- include "deltaserve.sharedMounts" .root | nindent 8 }}
        {{- if and $isCuda (gt (int .part.tpSize) 1) }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
  volumes:
    {{- include "deltaserve.sharedVolumes" .root | nindent 4 }}
    {{- if and $isCuda (gt (int .part.tpSize) 1) }}
    - name: shm # NCCL between the ranks; a container has 64 MiB otherwise
      emptyDir:
        medium: Memory
        sizeLimit: 2Gi
    {{- end }}
{{- end }}
