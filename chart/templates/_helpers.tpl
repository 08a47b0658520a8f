{{- define "nebula.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "nebula.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "nebula.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "nebula.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: nebula
{{ include "nebula.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "nebula.selector" -}}
app.kubernetes.io/name: {{ include "nebula.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* metadata: of one object. Takes {root, name, component, annotations, namespaced}. */}}
{{- define "nebula.metadata" -}}
name: {{ .name }}
{{- if ne (toString .namespaced) "false" }}
namespace: {{ default .root.Release.Namespace .place }}
{{- end }}
labels:
  {{- include "nebula.labels" .root | nindent 2 }}
  {{- with .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "nebula.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "nebula.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* A reference to an image. Takes {root, image, tag}. */}}
{{- define "nebula.image" -}}
{{- $registry := .root.Values.global.imageRegistry -}}
{{- $name := .image.repository -}}
{{- if $registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" $registry) $name -}}{{- end -}}
{{- $tag := default .tag .image.tag -}}
{{- if .image.digest -}}
{{- if $tag -}}{{- printf "%s:%s@%s" $name $tag .image.digest -}}{{- else -}}{{- printf "%s@%s" $name .image.digest -}}{{- end -}}
{{- else -}}
{{- printf "%s:%s" $name (required "an image needs a tag or a digest" $tag) -}}
{{- end -}}
{{- end -}}

{{- define "nebula.controllerImage" -}}
{{- include "nebula.image" (dict "root" . "image" .Values.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{- define "nebula.postgresImage" -}}
{{- include "nebula.image" (dict "root" . "image" .Values.database.bundled.image "tag" "") -}}
{{- end -}}

{{- define "nebula.onOpenshift" -}}
{{- if or (eq .Values.global.openshift "force") (and (eq .Values.global.openshift "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}true{{- end -}}
{{- end -}}

{{/* What every Pod of the chart has in common. Takes {root, uid, serviceAccount, token, context}. */}}
{{- define "nebula.podBasics" -}}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
serviceAccountName: {{ .serviceAccount }}
automountServiceAccountToken: {{ .token }}
enableServiceLinks: false
securityContext:
  {{- $given := .context | default dict }}
  {{- $safe := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
  {{- if not (include "nebula.onOpenshift" .root) }}
  {{- $_ := set $safe "runAsUser" .uid }}
  {{- $_ := set $safe "runAsGroup" .uid }}
  {{- $_ := set $safe "fsGroup" .uid }}
  {{- $_ := set $safe "fsGroupChangePolicy" "OnRootMismatch" }}
  {{- end }}
  {{- range $key, $value := $given }}{{- $_ := set $safe $key $value }}{{- end }}
  {{- toYaml $safe | nindent 2 }}
{{- end -}}

{{- define "nebula.containerSecurity" -}}
{{- $safe := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- range $key, $value := . }}{{- $_ := set $safe $key $value }}{{- end -}}
{{- toYaml $safe -}}
{{- end -}}

{{- define "nebula.uid" -}}65532{{- end -}}
{{- define "nebula.postgresUid" -}}999{{- end -}}

{{/* A StatefulSet's name may have 52 characters: its Pods' revision label adds 11. So may a CronJob's, a Job's 63. */}}
{{- define "nebula.postgres" -}}{{ include "nebula.fullname" . | trunc 43 | trimSuffix "-" }}-postgres{{- end -}}
{{- define "nebula.backup" -}}{{ include "nebula.fullname" . | trunc 36 | trimSuffix "-" }}-postgres-backup{{- end -}}
{{- define "nebula.backupVolume" -}}{{ include "nebula.fullname" . | trunc 31 | trimSuffix "-" }}-postgres-backup-volume{{- end -}}
{{- define "nebula.fake" -}}{{ include "nebula.fullname" . }}-fake-cloud{{- end -}}
{{- define "nebula.webhookService" -}}{{ include "nebula.fullname" . }}-webhook{{- end -}}

{{- define "nebula.databaseSecret" -}}
{{- if .Values.database.existingSecret -}}
{{- .Values.database.existingSecret -}}
{{- else if eq .Values.database.mode "bundled" -}}
{{- include "nebula.postgres" . -}}
{{- else -}}
{{- fail "database.existingSecret is needed where database.mode is external: a Secret with the user and password" -}}
{{- end -}}
{{- end -}}

{{- define "nebula.reportSecret" -}}
{{- default (printf "%s-report" (include "nebula.postgres" .)) .Values.database.reportRole.existingSecret -}}
{{- end -}}

{{/* The connection without user and password. */}}
{{- define "nebula.databaseUrl" -}}
{{- if eq .Values.database.mode "bundled" -}}
{{- printf "postgresql://%s.%s.svc:5432/%s?sslmode=disable" (include "nebula.postgres" .) .Release.Namespace .Values.database.bundled.database -}}
{{- else -}}
{{- $at := .Values.database.external -}}
{{- $host := required "database.external.host is needed where database.mode is external" $at.host -}}
{{- if contains ":" $host -}}{{- $host = printf "[%s]" (trimAll "[]" $host) -}}{{- end -}}
{{- $url := printf "postgresql://%s:%d/%s?sslmode=%s" $host (int $at.port) $at.database $at.sslMode -}}
{{- if $at.caSecret -}}{{- $url = printf "%s&sslrootcert=/etc/nebula/database-ca/ca.crt" $url -}}{{- end -}}
{{- $url -}}
{{- end -}}
{{- end -}}

{{/* NEBULA_PROVIDERS: one entry a word. */}}
{{- define "nebula.providers" -}}
{{- $entries := list -}}
{{- if .Values.providers.fake.enabled -}}
{{- $entries = append $entries (printf "fake,url=http://%s.%s.svc:9090" (include "nebula.fake" .) .Release.Namespace) -}}
{{- end -}}
{{- $entries = concat $entries .Values.providers.extra -}}
{{- join " " $entries -}}
{{- end -}}

{{/* Variables that every command of ours reads. Without user and password: the database's own Secret may not be there yet. */}}
{{- define "nebula.env" -}}
- {name: NEBULA_NAMESPACE, value: {{ .Release.Namespace | quote }}}
- {name: NEBULA_WEBHOOK_SERVICE, value: {{ include "nebula.webhookService" . | quote }}}
- {name: NEBULA_DATABASE_URL, value: {{ include "nebula.databaseUrl" . | quote }}}
- {name: NEBULA_DATABASE_POOL, value: {{ .Values.database.pool | quote }}}
{{- if .Values.database.reportRole.enabled }}
- {name: NEBULA_REPORT_ROLE, value: {{ .Values.database.reportRole.name | quote }}}
{{- end }}
- {name: NEBULA_PROVIDERS, value: {{ include "nebula.providers" . | quote }}}
- {name: NEBULA_LOG_LEVEL, value: {{ .Values.controller.logLevel | quote }}}
- {name: NEBULA_LOG_FORMAT, value: {{ .Values.controller.logFormat | quote }}}
- {name: NEBULA_SWEEP_MODE, value: {{ .Values.sweeper.mode | quote }}}
- {name: NEBULA_SWEEP_MAX_MACHINES, value: {{ int .Values.sweeper.maxMachines | quote }}}
- {name: NEBULA_SWEEP_MAX_SHARE, value: {{ .Values.sweeper.maxShare | quote }}}
- {name: NEBULA_SWEEP_MARGIN_S, value: {{ int .Values.sweeper.marginSeconds | quote }}}
- {name: NEBULA_SWEEP_REPORT_ONLY_S, value: {{ int .Values.sweeper.reportOnlySeconds | quote }}}
- {name: NEBULA_SWEEP_VOLUMES, value: {{ .Values.sweeper.volumes | quote }}}
- {name: NEBULA_BILL_EVERY_S, value: {{ int .Values.cost.billEverySeconds | quote }}}
- {name: NEBULA_CLOSE_AFTER_S, value: {{ int .Values.cost.closeAfterSeconds | quote }}}
- {name: NEBULA_BUDGET_LOOK_AHEAD_S, value: {{ int .Values.cost.budgetLookAheadSeconds | quote }}}
{{- $own := dict "sweepMode" "sweeper.mode" "sweepMaxMachines" "sweeper.maxMachines" "sweepMaxShare" "sweeper.maxShare" "sweepMarginS" "sweeper.marginSeconds" "sweepReportOnlyS" "sweeper.reportOnlySeconds" "sweepVolumes" "sweeper.volumes" "billEveryS" "cost.billEverySeconds" "closeAfterS" "cost.closeAfterSeconds" "budgetLookAheadS" "cost.budgetLookAheadSeconds" "reportRole" "database.reportRole" "databasePool" "database.pool" "logLevel" "controller.logLevel" "logFormat" "controller.logFormat" }}
{{- range $name, $value := .Values.controller.options }}
{{- if hasKey $own $name }}
{{- fail (printf "controller.options.%s: set %s instead" $name (get $own $name)) }}
{{- end }}
- {name: {{ printf "NEBULA_%s" (snakecase $name | upper) }}, value: {{ include "nebula.text" $value | quote }}}
{{- end }}
{{- with .Values.proxy.http }}
- {name: HTTP_PROXY, value: {{ . | quote }}}
{{- end }}
{{- with .Values.proxy.https }}
- {name: HTTPS_PROXY, value: {{ . | quote }}}
{{- end }}
{{- with .Values.proxy.noProxy }}
- {name: NO_PROXY, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* A number, word or truth as one writes it: YAML's numbers come as floats, of which toString makes 6.7108864e+07. */}}
{{- define "nebula.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{- define "nebula.databaseLogin" -}}
- name: NEBULA_DATABASE_USER
  valueFrom: {secretKeyRef: {name: {{ include "nebula.databaseSecret" . }}, key: {{ .Values.database.secretKeys.username }}}}
- name: NEBULA_DATABASE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "nebula.databaseSecret" . }}, key: {{ .Values.database.secretKeys.password }}}}
{{- end -}}

{{/* The same for guards, which must say their word also where an install never came so far as to make the Secret:
     without it they take the database for away. PGUSER: a driver without a user asks for the container's, which has no name. */}}
{{- define "nebula.databaseLoginIfThere" -}}
- name: NEBULA_DATABASE_USER
  valueFrom: {secretKeyRef: {name: {{ include "nebula.databaseSecret" . }}, key: {{ .Values.database.secretKeys.username }}, optional: true}}
- name: NEBULA_DATABASE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "nebula.databaseSecret" . }}, key: {{ .Values.database.secretKeys.password }}, optional: true}}
- {name: PGUSER, value: nebula}
{{- end -}}

{{/* The CA that the database URL names, for every container that has the URL: its mount and its volume. */}}
{{- define "nebula.databaseCaMount" -}}
{{- if and (eq .Values.database.mode "external") .Values.database.external.caSecret -}}
- {name: database-ca, mountPath: /etc/nebula/database-ca, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Takes {root, optional}. */}}
{{- define "nebula.databaseCaVolume" -}}
{{- if and (eq .root.Values.database.mode "external") .root.Values.database.external.caSecret -}}
- name: database-ca
  secret: {secretName: {{ .root.Values.database.external.caSecret }}{{ if .optional }}, optional: true{{ end }}}
{{- end -}}
{{- end -}}

{{/* Where the database's Pods may run: the server's, and those of its backup. */}}
{{- define "nebula.postgresPlace" -}}
{{- $place := pick .Values.database.bundled "affinity" "nodeSelector" "tolerations" -}}
{{- range $key, $value := $place -}}{{- if not $value -}}{{- $_ := unset $place $key -}}{{- end -}}{{- end -}}
{{- with $place -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* The spec of the Job that is the backup volume's first Pod; its hash is in the Job's name. */}}
{{- define "nebula.backupVolumeJob" -}}
backoffLimit: 6 # it fails only with its node
template:
  metadata:
    labels:
      {{- include "nebula.labels" . | nindent 6 }}
      app.kubernetes.io/component: backup
  spec:
    {{- include "nebula.podBasics" (dict "root" . "uid" (int (include "nebula.postgresUid" .)) "serviceAccount" (include "nebula.postgres" .) "token" false "context" dict) | nindent 4 }}
    restartPolicy: Never
    containers:
      - name: touch
        image: {{ include "nebula.postgresImage" . }}
        imagePullPolicy: {{ .Values.database.bundled.image.pullPolicy }}
        # A word, no failure: a release is as good without it, and Helm 4 waits for Jobs.
        command: [/bin/sh, -c, "touch /backup/.writable && rm /backup/.writable || echo 'nebula: backups cannot be written'"]
        resources:
          {{- toYaml .Values.database.bundled.backup.resources | nindent 10 }}
        securityContext:
          {{- include "nebula.containerSecurity" dict | nindent 10 }}
        volumeMounts:
          - {name: backup, mountPath: /backup}
    volumes:
      - {name: backup, persistentVolumeClaim: {claimName: {{ include "nebula.postgres" . }}-backup}}
    {{- with include "nebula.postgresPlace" . }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}
