{{- define "dynamo.operator" -}}
dynamo-operator
{{- end -}}

{{- define "dynamo.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: dynamo
{{- end -}}

{{- define "dynamo.image" -}}
{{- $image := (index .Values "dynamo-operator").controllerManager.manager.image -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "dynamo.nats" -}}
{{- $given := (index .Values "dynamo-operator").natsAddr -}}
{{- if $given -}}{{ $given }}{{- else if .Values.global.nats.install -}}nats://{{ .Release.Name }}-nats.{{ .Release.Namespace }}.svc:4222{{- end -}}
{{- end -}}

{{- define "dynamo.etcd" -}}
{{- $given := (index .Values "dynamo-operator").etcdAddr -}}
{{- if $given -}}{{ $given }}{{- else if .Values.global.etcd.install -}}http://{{ .Release.Name }}-etcd.{{ .Release.Namespace }}.svc:2379{{- end -}}
{{- end -}}

{{- define "dynamo.target" -}}
{{- $restriction := (index .Values "dynamo-operator").namespaceRestriction -}}
{{- if $restriction.enabled -}}{{ $restriction.targetNamespace | default .Release.Namespace }}{{- end -}}
{{- end -}}

{{- /* Refuses settings that cannot have the requested effect, each in one line. */ -}}
{{- define "dynamo.check" -}}
{{- $operator := index .Values "dynamo-operator" -}}
{{- range $name := list "grove" "kai-scheduler" "lws" "disaggregatedset" "snapshot" -}}
{{- if (index $.Values.global $name).install -}}
{{- fail (printf "global.%s.install: this chart does not install %s; use its own chart and set %s" $name $name (printf "global.%s.enabled=true" $name)) -}}
{{- end -}}
{{- end -}}
{{- if $operator.webhook.certManager.enabled -}}
{{- fail "dynamo-operator.webhook.certManager.enabled: the operator issues and renews its own certificates; set it to false" -}}
{{- end -}}
{{- if and (eq $operator.discoveryBackend "etcd") (not (include "dynamo.etcd" .)) -}}
{{- fail "dynamo-operator.discoveryBackend etcd: requires dynamo-operator.etcdAddr or global.etcd.install=true" -}}
{{- end -}}
{{- end -}}
