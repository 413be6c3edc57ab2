// Package gatewayapi serves the HTTP API of xiaozhi-mqtt-gateway (its app.js,
// on Express) onto fleet.Service, so that consoles and scripts written for it
// continue to work: the same routes, tokens, statuses and bodies, byte for byte,
// as its commit 93f026a answers them.
//
// What it adds stays out of their way: the headers X-Fleetd-Code and
// X-Fleetd-Operation, statuses that tell failures apart with `?strict=1`, and
// the admin token of the fleet beside the daily one. It changes only what no
// caller can depend on: requests are authenticated before their body is read,
// refusals of Express itself are JSON and not HTML pages, and a device is found
// by its MAC address alone, since GID and uuid differ between programs that
// create client ids.
package gatewayapi

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
)

// DefaultTimeout is the gateway's fixed one: from the request to the device's
// answer, waiting included.
const DefaultTimeout = 5 * time.Second

// Headers of every answer.
const (
	HeaderCode      = "X-Fleetd-Code"      // `ok`, `ignored`, or the stable error code
	HeaderOperation = "X-Fleetd-Operation" // an opaque id that the log has too
	// HeaderConfirmation carries what confirms a call that was refused as
	// confirmation_required, in the answer and in the request made again.
	HeaderConfirmation = "X-Fleetd-Confirmation"
)

// Codes beyond those of the core.
const (
	CodeOK             devices.Code = "ok"
	CodeIgnored        devices.Code = "ignored" // a notification: devices do nothing with it, so it was not sent
	CodeNotImplemented devices.Code = "not_implemented"
)

// Route names a route in metrics and log.
type Route string

// Routes.
const (
	RouteCommands Route = "commands"
	RouteStatus   Route = "status"
	RouteCalls    Route = "calls" // between two devices: not offered
	RouteOther    Route = "other"
)

// Service is what the API needs of the core.
type Service interface {
	// Get describes a device; only whether it is connected, and whether a
	// conversation is open, is used.
	Get(ctx context.Context, id devices.ID) (devices.View, error)
	// Permit returns why a caller may not see a device, or any device; nil if it may.
	Permit(ctx context.Context, by access.Principal, scope access.Scope, id devices.ID) error
	// CallRPC sends an MCP request to a device wherever it is connected.
	// tools/call takes the one checked path of all calls.
	CallRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error)
	// NoteRefusal records the refusal of a request.
	NoteRefusal(by access.Principal, action string, id devices.ID, err error)
}

// Options of a Server. All fields but Timeout are required.
type Options struct {
	Service Service
	Gateway *credential.Gateway
	Timeout time.Duration         // of one request; 0 means DefaultTimeout
	Auth    *access.Authenticator // whose tokens are accepted, too
	// Failures slows down clients that try tokens; may be nil.
	Failures *connlimit.Failures
	// Work bounds what each caller has the node do without a device; may be nil.
	Work *connlimit.Work
	Log  *slog.Logger
}

// RequestKey is what requests are counted by.
type RequestKey struct {
	Route Route
	Code  devices.Code
}

// Server is the API: an http.Handler for plain HTTP. Every answer is given
// within Timeout once the body is read, so its http.Server should have a
// ReadTimeout of some seconds.
type Server struct {
	opt Options
	mux *http.ServeMux

	refusals *rate.Limiter // lines of the log
	unlogged atomic.Int64  // refused requests since the last line

	// Requests counts answers. Keys are a closed set.
	Requests counters.Map[RequestKey]
}

// New returns a Server.
func New(opt Options) *Server {
	opt.Timeout = cmp.Or(opt.Timeout, DefaultTimeout)
	s := &Server{opt: opt, mux: http.NewServeMux(), refusals: rate.NewLimiter(refusedLines, refusedBurst)}
	for pattern, route := range map[string]struct {
		name   Route
		handle func(*exchange)
	}{
		"POST /api/commands/{clientId}": {RouteCommands, s.command},
		"POST /api/devices/status":      {RouteStatus, s.status},
		"POST /api/call/request":        {RouteCalls, refuseCalls},
		"POST /api/call/accept":         {RouteCalls, refuseCalls},
	} {
		handler := s.serve(route.name, s.admitted(route.handle))
		s.mux.Handle(pattern, handler)
		s.mux.Handle(pattern+"/{$}", handler) // Express takes a slash at the end, too
	}
	s.mux.Handle("/", s.serve(RouteOther, unknown))
	return s
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// exchange is one request and what becomes of it. A handler sets the last four.
type exchange struct {
	w         http.ResponseWriter
	r         *http.Request
	operation string
	strict    bool // failures have statuses of their own
	by        access.Principal
	device    devices.ID
	method    string

	status   int
	code     devices.Code
	body     []byte
	internal error // internal error (bug), for the log
}

// Limits of log lines about unauthenticated requests, which anyone can cause.
const (
	refusedLines = 1 // per second
	refusedBurst = 20
)

// maxLoggedMethod bounds what a caller can write into a line of the log.
const maxLoggedMethod = 64

func (s *Server) serve(route Route, handle func(*exchange)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begun := time.Now()
		x := &exchange{w: w, r: r, operation: rand.Text(), strict: r.URL.RawQuery != "" && r.URL.Query().Get("strict") == "1"}
		handle(x)
		h := w.Header()
		h.Set("Content-Type", "application/json; charset=utf-8")
		h.Set("Content-Length", strconv.Itoa(len(x.body)))
		h.Set(HeaderCode, string(x.code))
		h.Set(HeaderOperation, x.operation)
		w.WriteHeader(x.status)
		_, _ = w.Write(x.body) // fails only if the client has disconnected
		s.Requests.Add(RequestKey{route, x.code}, 1)
		s.log(route, x, time.Since(begun))
	})
}

// log writes one line per request, and few of those without a token: calls act on devices, and a caller who
// reports an operation wants it found. Status queries, which consoles repeat
// all day, are only logged at level debug.
func (s *Server) log(route Route, x *exchange, took time.Duration) {
	level := slog.LevelInfo
	switch {
	case x.internal != nil:
		level = slog.LevelError
	case route == RouteStatus && x.code == CodeOK:
		level = slog.LevelDebug
	}
	if !s.opt.Log.Enabled(x.r.Context(), level) {
		return
	}
	if x.by.Caller == nil && x.internal == nil && !s.refusals.Allow() {
		s.unlogged.Add(1)
		return
	}
	attrs := []slog.Attr{slog.String("route", string(route)), slog.String("operation", x.operation), slog.String("code", string(x.code)),
		slog.Int("status", x.status), slog.String("remote", x.r.RemoteAddr), slog.Duration("took", took)}
	if x.by.Caller != nil {
		attrs = append(attrs, slog.String("caller", x.by.Name()))
	}
	if x.device != "" {
		attrs = append(attrs, slog.String("device", string(x.device)))
	}
	if x.method != "" {
		attrs = append(attrs, slog.String("method", x.method[:min(len(x.method), maxLoggedMethod)]))
	}
	if x.internal != nil {
		attrs = append(attrs, slog.Any("error", x.internal))
	}
	if n := s.unlogged.Swap(0); n > 0 {
		attrs = append(attrs, slog.Int64("refused_without_a_line", n))
	}
	s.opt.Log.LogAttrs(x.r.Context(), level, "gateway API request", attrs...)
}

// Error texts of the gateway.
const (
	textNoToken      = "未提供有效的Authorization头"
	textWrongToken   = "无效的授权令牌"
	textNotConnected = "设备未连接"
	textBadCommand   = "指令类型无效"
	textNoList       = "clientIds必须是一个数组"
	textTimeout      = "timeout"
	textClosed       = "Connection closed"
)

// admitted calls handle for requests with a token that is good. Like the
// gateway it takes `Bearer ` in no other case, and uses the text between
// the first blank and the second.
func (s *Server) admitted(handle func(*exchange)) func(*exchange) {
	return func(x *exchange) {
		rest, found := strings.CutPrefix(x.r.Header.Get("Authorization"), "Bearer ")
		if !found {
			x.w.Header().Set("Connection", "close") // leaves the connection to clients that authenticate
			x.refuse(http.StatusUnauthorized, devices.CodeUnauthorized, textNoToken)
			return
		}
		token, _, _ := strings.Cut(rest, " ")
		now := clock.Now()
		x.by = access.Principal{Caller: access.Gateway, Via: access.ViaGateway, From: s.opt.Failures.Client(x.r)}
		if !s.opt.Gateway.IsDaily(token, now) {
			var err error
			if x.by.Caller, err = s.opt.Auth.Authenticate(token, now); err != nil {
				status := http.StatusUnauthorized
				if !errors.Is(err, access.ErrResource) && s.opt.Failures.FailedRequest(x.r) {
					status = http.StatusTooManyRequests
				}
				x.w.Header().Set("Connection", "close")
				x.refuse(status, devices.CodeUnauthorized, textWrongToken)
				s.opt.Service.NoteRefusal(x.by, x.r.Pattern, "", &devices.Error{Code: devices.CodeUnauthorized, Detail: err.Error()})
				return
			}
		}
		connlimit.MarkRequestAuthenticated(x.r.Context())
		handle(x)
		units := connlimit.WorkOfBody(x.r, BodyLimit)
		if x.code != CodeOK {
			units++
		}
		_ = s.opt.Work.BeginUnits(x.r.Context(), x.by.Key(), units) // delays the answer: consoles know no 429
	}
}

// refuseCalls replaces the route that connects the audio of two devices in the gateway.
func refuseCalls(x *exchange) {
	x.refuse(http.StatusNotImplemented, CodeNotImplemented,
		"fleetd does not bridge calls between devices; keep the gateway for these, or use another service")
}

func unknown(x *exchange) {
	x.w.Header().Set("Connection", "close")
	x.refuse(http.StatusNotFound, devices.CodeNotFound,
		"there is nothing here: POST to /api/commands/{clientId} or /api/devices/status")
}

// refuse answers like the gateway's middleware: the error alone.
func (x *exchange) refuse(status int, code devices.Code, text string) {
	x.status, x.code = status, code
	x.body = append(appendString([]byte(`{"error":`), text), '}')
}
