{{- define "prioscope.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "prioscope.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- $name := include "prioscope.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Labels of one exporter: dict "root" $ "component" "gpu". */ -}}
{{- define "prioscope.selector" -}}
app.kubernetes.io/name: {{ include "prioscope.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "prioscope.labels" -}}
{{ include "prioscope.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "prioscope.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{- define "prioscope.serviceAccount" -}}
{{- if .Values.kubernetes.serviceAccount.create -}}
{{ default (printf "%s-kubernetes" (include "prioscope.fullname" .)) .Values.kubernetes.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.kubernetes.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- /* Probes: readiness is left to Prometheus' own `up`, so that a stale exporter can still say why it is stale. */ -}}
{{- define "prioscope.probes" -}}
startupProbe:
  {{- include "prioscope.probe" . | nindent 2 }}
  failureThreshold: 30
  periodSeconds: 2
livenessProbe:
  {{- include "prioscope.probe" . | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 5
{{- end }}

{{- define "prioscope.probe" -}}
{{- if .Values.webConfig.mutualTls -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: /-/healthy, port: metrics, scheme: {{ .Values.webConfig.scheme }}}
{{- end -}}
{{- end }}
