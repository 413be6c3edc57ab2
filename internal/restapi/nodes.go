package restapi

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

type diagnosisInput struct {
	Device string `query:"device" doc:"This is the id of a device. Without it the answer is for a device that does not exist."`
}

type logLevelInput struct{ Body api.LogLevel }

func (s *Server) nodeRoutes() {
	register(s, s.operation(http.MethodGet, "/v1/nodes", about{id: "listNodes", scope: access.ScopeAdmin, tag: tagNodes, summary: "List nodes",
		answer: "A page, in order of name."}), s.listNodes)
	register(s, withAnswer(s.operation(http.MethodGet, "/v1/diagnosis", about{id: "diagnose", scope: access.ScopeAdmin, tag: tagNodes,
		summary: "See the world as a device does", answer: "The exact OTA reply, and what is wrong with it."}),
		"application/json", schemaOf[api.Diagnosis](s)), s.diagnose)
	register(s, s.operation(http.MethodGet, "/v1/log-level", about{id: "getLogLevel", scope: access.ScopeAdmin, tag: tagNodes, summary: "Get the log level",
		answer: "The level."}), func(context.Context, *struct{}) (*answer[api.LogLevel], error) { return s.level(), nil })
	register(s, s.operation(http.MethodPut, "/v1/log-level", about{id: "setLogLevel", scope: access.ScopeAdmin, tag: tagNodes, summary: "Set the log level",
		text: "Of this node, until it stops.", answer: "The level."}), s.setLevel)
	live := s.operation(http.MethodGet, "/livez", about{id: "live", public: true, tag: tagNodes, summary: "Tell whether the node runs", answer: "It runs."})
	live.SkipValidateParams = true // probes may add some
	register(s, withAnswer(live, "text/plain", &huma.Schema{Type: huma.TypeString}), serveLive)
	ready := s.operation(http.MethodGet, "/readyz", about{id: "ready", public: true, tag: tagNodes, summary: "Tell whether the node wants traffic",
		answer: "It does."})
	ready.SkipValidateParams = true
	ready.Responses["503"] = &huma.Response{Description: "It does not, and why.", Content: map[string]*huma.MediaType{valueJSON[0]: {Schema: schemaOf[api.Readiness](s)}}}
	register(s, ready, s.serveReady)
	metrics := s.operation(http.MethodGet, "/metrics", about{id: "metrics", public: true, tag: tagNodes, summary: "Get metrics for Prometheus",
		answer: "Its text format."})
	metrics = withAnswer(metrics, "text/plain", &huma.Schema{Type: huma.TypeString})
	s.api.OpenAPI().AddOperation(&metrics) // what serves it comes later
}

func (s *Server) listNodes(ctx context.Context, in *Page) (*answer[api.List[api.Node]], error) {
	p, err := s.page(ctx, *in)
	if err != nil {
		return nil, err
	}
	var nodes []api.Node
	for _, n := range slices.SortedFunc(slices.Values(s.opt.Nodes()), func(a, b devices.Node) int { return cmp.Compare(a.Name, b.Name) }) {
		nodes = append(nodes, api.Node{Name: n.Name, Version: n.Version, Started: api.At(n.Started), Devices: n.Devices, API: n.API})
	}
	list, err := fillPage(p, pieceLimit, inMemory(nodes, func(n *api.Node) string { return n.Name }))
	return answerOf(list, err)
}

func (s *Server) diagnose(_ context.Context, in *diagnosisInput) (*raw, error) {
	var id devices.ID
	if in.Device != "" {
		var err error
		if id, err = parseDevice(in.Device); err != nil {
			return nil, err
		}
	}
	d := s.opt.Diagnoser.Diagnose(id)
	b := jsonspan.AppendString([]byte(`{"ota_url":`), d.OTAURL)
	b = jsonspan.AppendString(append(b, `,"device":`...), string(d.Device))
	b = strconv.AppendInt(append(b, `,"status":`...), int64(d.Status), 10)
	b = append(b, `,"reply":`...)
	if len(d.Reply) == 0 {
		b = append(b, "null"...)
	}
	b = append(b, d.Reply...)
	if s.opt.PublicAPIURL != "" {
		b = jsonspan.AppendString(append(b, `,"public_api_url":`...), s.opt.PublicAPIURL)
	}
	b = append(b, `,"findings":[`...)
	for i, f := range d.Findings {
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonspan.AppendString(append(b, `{"severity":`...), string(f.Severity))
		b = jsonspan.AppendString(append(b, `,"setting":`...), f.Setting)
		b = append(jsonspan.AppendString(append(b, `,"message":`...), f.Message), '}')
	}
	b = append(b, ']')
	if d.Probe.URL != "" {
		b = jsonspan.AppendString(append(b, `,"probe":{"url":`...), d.Probe.URL)
		b = strconv.AppendInt(append(b, `,"size":`...), d.Probe.Size, 10)
		b = append(jsonspan.AppendString(append(b, `,"sha256":`...), d.Probe.SHA256), '}')
	}
	return newRaw(append(b, "}\n"...)), nil
}

func (s *Server) level() *answer[api.LogLevel] {
	return &answer[api.LogLevel]{api.LogLevel{Level: strings.ToLower(s.opt.LogLevel.Level().String())}}
}

func (s *Server) setLevel(ctx context.Context, in *logLevelInput) (*answer[api.LogLevel], error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(in.Body.Level)); err != nil {
		return nil, badRequest("level is debug, info, warn or error")
	}
	s.opt.LogLevel.Set(level)
	s.opt.Log.Info("log level set", "level", level)
	s.opt.Service.NoteChange(caller(ctx), "log-level", "", level.String(), nil)
	return s.level(), nil
}

// serveLive answers as long as the process serves requests.
func serveLive(context.Context, *struct{}) (*raw, error) {
	return &raw{"text/plain; charset=utf-8", []byte("ok\n")}, nil
}

// readiness is 503 while some part is down or the node stops.
type readiness struct {
	Status       int
	CacheControl string `header:"Cache-Control"`
	Body         api.Readiness
}

func (s *Server) serveReady(context.Context, *struct{}) (*readiness, error) {
	out := &readiness{http.StatusOK, "no-store", api.Readiness{Ready: true, Down: map[string]string{}}}
	for part, err := range s.opt.Ready() {
		if err != nil {
			out.Body.Down[part] = err.Error()
		}
	}
	if s.opt.Draining() {
		out.Body.Down["node"] = "stopping"
	}
	if len(out.Body.Down) > 0 {
		out.Status, out.Body.Ready = http.StatusServiceUnavailable, false
	}
	return out, nil
}
