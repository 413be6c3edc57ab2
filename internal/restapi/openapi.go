package restapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/precompressed"
	"fleetd/internal/selector"
)

// Tags group the operations.
const (
	tagDevices  = "devices"
	tagTools    = "tools"
	tagEvents   = "events"
	tagPhotos   = "photos"
	tagNodes    = "nodes"
	tagAccess   = "access"
	tagAudit    = "audit"
	tagJobs     = "jobs"
	tagExplain  = "explain"
	tagWebhooks = "webhooks"
	tagFirmware = "firmware"
)

// newAPI sets huma up without its own routes: the document is served by us,
// and its page would load scripts from another host.
func (s *Server) newAPI() {
	format := huma.Format{Marshal: marshal, Unmarshal: json.Unmarshal}
	s.api = humago.New(s.mux, huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{Title: "fleetd", Version: s.opt.Version,
				Description: "The control plane of a fleet of devices that run the xiaozhi-esp32 firmware. Lists take `limit` and `cursor`; " +
					"errors are problem documents (RFC 9457) with a stable `code`; request bodies may have 64 KiB."},
			Components: &huma.Components{SecuritySchemes: map[string]*huma.SecurityScheme{
				"token": {Type: "http", Scheme: "bearer", Description: "An API key (`fleetd keys create`), or the admin token, the same on every node of a fleet. Each operation names the scope that the key needs."}}},
			Servers:  []*huma.Server{{URL: "/", Description: "The node that this document came from."}},
			Security: []map[string][]string{{"token": {}}},
			Tags: []*huma.Tag{
				{Name: tagDevices, Description: "Who belongs to the fleet, and how they are."},
				{Name: tagTools, Description: "What devices can do, and making them do it."},
				{Name: tagJobs, Description: "What is to happen on many devices, later, or when a device is there: once."},
				{Name: tagExplain, Description: "Why a device or a call is as it is, from what the nodes recorded in memory."},
				{Name: tagEvents, Description: "What happens, as it happens."},
				{Name: tagWebhooks, Description: "What happens, delivered to addresses of yours."},
				{Name: tagPhotos, Description: "What cameras and screens uploaded."},
				{Name: tagFirmware, Description: "Firmware images, which devices could run them, and rollouts, which give them to devices."},
				{Name: tagNodes, Description: "The nodes themselves."},
				{Name: tagAccess, Description: "Who may do what: API keys, and the rules of the tool guard."},
				{Name: tagAudit, Description: "Who did what."},
			},
		},
		Formats:                      map[string]huma.Format{"application/json": format, "json": format},
		DefaultFormat:                "application/json",
		RejectUnknownQueryParameters: true,
		Transformers:                 []huma.Transformer{refusals},
	})
	s.api.OpenAPI().Components.Schemas.RegisterTypeAlias(reflect.TypeFor[selector.Selector](), reflect.TypeFor[selectorSchema]())
	s.api.OpenAPI().Components.Schemas.RegisterTypeAlias(reflect.TypeFor[api.Selection](), reflect.TypeFor[selectorSchema]())
	s.api.OpenAPI().Components.Schemas.RegisterTypeAlias(reflect.TypeFor[api.Time](), reflect.TypeFor[timeSchema]())
	s.api.OpenAPI().Components.Schemas.RegisterTypeAlias(reflect.TypeFor[api.Amount](), reflect.TypeFor[amountSchema]())
	s.api.UseMiddleware(wrapContext)
}

// selectorSchema describes a selector of keys and rules.
type selectorSchema struct{}

// Schema implements huma.SchemaProvider.
func (selectorSchema) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{
		OneOf: []*huma.Schema{
			{Type: huma.TypeString, Examples: []any{"room in (lab,hall),!retired"},
				Description: "Terms joined by commas, all of which must hold: room=lab, room!=lab, room in (a,b), room not in (a,b), room, !room; * in a value stands for any characters. " +
					"device is the device's id; every other name is a label."},
			{Type: huma.TypeObject, AdditionalProperties: &huma.Schema{Type: huma.TypeString}, Examples: []any{map[string]any{"room": "lab"}},
				Description: "The labels that a device must have, each with its value; device is the device's id."},
		},
	}
}

// marshal writes one JSON value, at once when all of it is encoded. It does not
// report a write that fails: the client is gone, which is not a failure of the operation.
func marshal(w io.Writer, v any) error {
	encoder := json.NewEncoder(writeAnyway{w})
	encoder.SetEscapeHTML(false)
	return encoder.Encode(v)
}

// writeAnyway writes, and has written whatever becomes of it.
type writeAnyway struct{ w io.Writer }

// Write implements io.Writer.
func (w writeAnyway) Write(p []byte) (int, error) {
	_, _ = w.w.Write(p)
	return len(p), nil
}

// schemaOf is a reference to the schema of a type.
func schemaOf[T any](s *Server) *huma.Schema {
	return s.api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[T](), true, "")
}

// about describes an operation.
type about struct {
	id, tag, summary, text string
	// Exactly one of three: scope is what the caller must have, anyone lets in
	// every caller with a token, public also those without.
	scope  access.Scope
	anyone bool
	public bool
	// judged: the core checks the caller, since the decision depends on more
	// than the scope and the device.
	judged bool
	// hides: a device outside of the caller's limits is answered as an unknown one.
	hides  bool
	status int    // of success, 200 if zero
	answer string // what success is
	codes  []devices.Code
}

// operation is the part that every operation has.
func (s *Server) operation(method, path string, a about) huma.Operation {
	if a.public == (a.anyone || a.scope != "") || a.anyone && a.scope != "" {
		panic(a.id + ": an operation needs a scope, or is for anyone, or is public") // a bug, found by any test
	}
	a.status = cmp.Or(a.status, http.StatusOK)
	if a.scope != "" {
		a.codes = append(a.codes[:len(a.codes):len(a.codes)], devices.CodeForbidden)
	}
	responses := map[string]*huma.Response{
		strconv.Itoa(a.status): {Description: a.answer},
		"default": {Description: "A problem; code is one of " + codeList(a.codes) + ".", Content: map[string]*huma.MediaType{
			valueProblem[0]: {Schema: schemaOf[api.Problem](s)}}},
	}
	op := huma.Operation{Method: method, Path: path, OperationID: a.id, Tags: []string{a.tag}, Summary: a.summary,
		Description: a.text, DefaultStatus: a.status, Responses: responses, MaxBodyBytes: BodyLimit + 1}
	if a.public {
		s.public[path] = true
		if len(a.codes) == 0 {
			delete(op.Responses, "default") // they do not fail
		}
		op.Security = []map[string][]string{}
		return op
	}
	op.Security = []map[string][]string{{"token": {}}}
	if a.scope != "" {
		op.Security = []map[string][]string{{"token": {string(a.scope)}}}
	}
	op.Middlewares = huma.Middlewares{s.guardOperation(a)}
	s.rights[method+" "+path] = a
	return op
}

// Codes that any operation may answer with.
var generalCodes = []devices.Code{devices.CodeBadRequest, devices.CodeUnauthorized, devices.CodeRateLimited, devices.CodeInternal}

func codeList(codes []devices.Code) string {
	var names []string
	for _, code := range append(codes[:len(codes):len(codes)], generalCodes...) {
		status, _ := code.Status()
		names = append(names, "`"+string(code)+"` ("+strconv.Itoa(status)+")")
	}
	return strings.Join(names, ", ")
}

// withAnswer sets what a success carries, where huma cannot know.
func withAnswer(op huma.Operation, contentType string, schema *huma.Schema) huma.Operation {
	op.Responses[strconv.Itoa(op.DefaultStatus)].Content = map[string]*huma.MediaType{contentType: {Schema: schema}}
	return op
}

// register adds an operation. Here alone the errors of its handler become problems; what it returns beside an error is dropped.
func register[In, Out any](s *Server, op huma.Operation, handler func(context.Context, *In) (*Out, error)) {
	huma.Register(s.api, op, func(ctx context.Context, in *In) (*Out, error) {
		out, err := handler(ctx, in)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})
}

// plain adds an operation whose handler writes its own answer: a stream, a file, or JSON of a device, which must not change
// by a byte. huma reads and checks the parameters, not the body.
func plain[In any](s *Server, op huma.Operation, handler func(w http.ResponseWriter, r *http.Request, in *In)) {
	body := op.RequestBody
	op.RequestBody = nil // or huma would read it
	register(s, op, func(_ context.Context, in *In) (*huma.StreamResponse, error) {
		return &huma.StreamResponse{Body: func(ctx huma.Context) {
			r, w := humago.Unwrap(ctx)
			handler(w, r, in)
		}}, nil
	})
	if body != nil {
		s.api.OpenAPI().Paths[op.Path].Post.RequestBody = body
	}
}

// registerRaw adds an operation that takes the body, of that schema, as it came.
func registerRaw[In, Out any](s *Server, op huma.Operation, body *huma.Schema, handler func(context.Context, *In) (*Out, error)) {
	op.SkipValidateBody = true
	op.RequestBody = s.jsonBody(body, true)
	register(s, op, handler)
	op.RequestBody.Content = map[string]*huma.MediaType{valueJSON[0]: {Schema: body}} // alone
}

// checkQuery refuses parameters that are given twice: what is ignored would answer another question.
func checkQuery(r *http.Request) error {
	if r.URL.RawQuery == "" {
		return nil
	}
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return badRequest("the query cannot be read: " + err.Error())
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if len(values[name]) > 1 {
			return badRequest("query parameter " + strconv.Quote(name) + " is given twice; give it once")
		}
	}
	return nil
}

func (s *Server) jsonBody(schema *huma.Schema, required bool) *huma.RequestBody {
	return &huma.RequestBody{Required: required, Content: map[string]*huma.MediaType{"application/json": {Schema: schema}}}
}

// raw is an answer that is encoded already, because it holds JSON that must
// not change by a byte.
type raw struct {
	ContentType string `header:"Content-Type" hidden:"true"`
	Body        []byte
}

func newRaw(body []byte) *raw { return &raw{valueJSON[0], body} }

// rootText is for people and programs that begin with the address alone.
const rootText = `fleetd, the API of a node
/console/      the web console; fleetd console opens it
/docs          for people: every operation, and the scope that it needs
/openapi.json  the same for programs
/v1/           REST, with an API key as bearer token (fleetd keys create)
/mcp           for hosts of language models
/livez /readyz /metrics
`

// documentRoutes renders the document: after this no operation can be added.
func (s *Server) documentRoutes() {
	document := s.api.OpenAPI()
	schemas := document.Components.Schemas.Map()
	delete(schemas, "ErrorModel") // huma registers its own, which nothing here sends
	delete(schemas, "ErrorDetail")
	for _, op := range []*huma.Operation{document.Paths["/livez"].Get, document.Paths["/readyz"].Get} {
		delete(op.Responses, "default")
	}
	openAnswers(document)
	// Most nodes are not asked for them.
	encoded := sync.OnceValue(func() precompressed.Answer {
		var b bytes.Buffer
		if err := marshal(&b, document); err != nil {
			panic("the OpenAPI document does not encode: " + err.Error()) // a bug, found by any test
		}
		return precompressed.New(valueJSON[0], b.Bytes())
	})
	page := sync.OnceValues(func() (precompressed.Answer, string) {
		text, policy := renderPage(document)
		return precompressed.New("text/html; charset=utf-8", text), policy
	})
	s.HandlePublic("GET /openapi.json", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { encoded().ServeHTTP(w, r) }))
	s.HandlePublic("GET /{$}", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte(rootText))
	}))
	s.public["/"] = true
	s.HandlePublic("GET /docs", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, policy := page()
		w.Header().Set("Content-Security-Policy", policy)
		w.Header().Set("Referrer-Policy", "no-referrer")
		answer.ServeHTTP(w, r)
	}))
}

// openAnswers lets answers have members that are not described yet: requests
// are strict, but a client must live with a newer server.
func openAnswers(document *huma.OpenAPI) {
	strict := map[string]bool{}
	for _, item := range document.Paths {
		for _, op := range []*huma.Operation{item.Post, item.Put, item.Patch} {
			if op != nil && op.RequestBody != nil {
				if body := op.RequestBody.Content[valueJSON[0]]; body != nil {
					strict[body.Schema.Ref] = true
				}
			}
		}
	}
	for name, schema := range document.Components.Schemas.Map() {
		if !strict["#/components/schemas/"+name] {
			schema.AdditionalProperties = nil
		}
	}
}

func (s *Server) callRoutes() {
	codes := []devices.Code{devices.CodeTooLarge, devices.CodeInvalidArguments, devices.CodeToolDenied, devices.CodeConfirmation,
		devices.CodeDeviceUnknown, devices.CodeToolUnknown, devices.CodeDeviceOffline, devices.CodeSuperseded, devices.CodeConnectionLost,
		devices.CodeDeviceBusy, devices.CodeDeviceError, devices.CodeDeviceTimeout, devices.CodeUnavailable}
	call := withAnswer(s.operation(http.MethodPost, pathCall, about{id: "callTool", scope: access.ScopeCall, judged: true, tag: tagTools, summary: "Call a tool",
		text: "A tool that fails on the device is 200 with isError. A call is never repeated after a timeout: the device may have acted. " +
			"A client that goes away ends its call.",
		answer: "What the tool answered.", codes: codes}), "application/json", schemaOf[api.ToolResult](s))
	call.RequestBody = s.jsonBody(schemaOf[api.ToolCall](s), false)
	call.Responses["202"] = &huma.Response{Description: "With later: the device is not connected, and the job calls it when it is back.",
		Content: map[string]*huma.MediaType{valueJSON[0]: {Schema: schemaOf[api.QueuedCall](s)}}}
	text := &huma.Schema{Type: huma.TypeString}
	call.Parameters = []*huma.Param{
		{Name: "device", In: "path", Required: true, Description: "Device id.", Schema: text},
		{Name: "tool", In: "path", Required: true, Description: "Tool name, such as `self.audio_speaker.set_volume`.", Schema: text},
		{Name: headerKey, In: "header", Description: "With later alone: the same key and call again answer with the same job, for 7 days.", Schema: text}}
	s.mux.HandleFunc(http.MethodPost+" "+pathCall, s.call) // the hot path: it judges its caller, and huma would cost as much as the call
	s.api.OpenAPI().AddOperation(&call)
	rpc := withAnswer(s.operation(http.MethodPost, pathMCP, about{id: "sendRequest", scope: access.ScopeCall, judged: true, tag: tagTools, summary: "Send any MCP request",
		text:   "Any method but initialize; tools/call takes the path of a tool call, checks included.",
		answer: "Exactly one of result and error.", codes: codes}), "application/json", schemaOf[api.RPCResult](s))
	rpc.RequestBody = s.jsonBody(schemaOf[api.RPC](s), true)
	plain(s, rpc, s.mcp)
}
