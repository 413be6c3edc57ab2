package restapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
)

const (
	pathCall = "/v1/devices/{device}/tools/{tool}/call"
	pathMCP  = "/v1/devices/{device}/mcp"
)

// HeaderCall is the header of answers and problems with the id of the call, raw request or message.
const HeaderCall = "Fleetd-Call"

// exchange holds what one request and its answer are made of. Nothing of it
// is referred to once the handler has returned.
type exchange struct {
	in, out []byte
	call    string // its id
	queued  bool   // answered with the job that makes the call later
}

var exchanges = sync.Pool{New: func() any { return &exchange{in: make([]byte, 0, 2048), out: make([]byte, 0, 2048)} }}

// maxPooled is the largest buffer kept for the next request.
const maxPooled = 2 * BodyLimit

func (x *exchange) free() {
	if cap(x.in) <= maxPooled && cap(x.out) <= maxPooled {
		exchanges.Put(x)
	}
}

var errTooLarge = newProblem(&devices.Error{Code: devices.CodeTooLarge, Detail: "a request body may have " + strconv.Itoa(BodyLimit) + " bytes"})

// read reads the whole body: only then does net/http notice that the client
// goes away.
func (x *exchange) read(r *http.Request) error {
	if r.ContentLength > BodyLimit {
		return errTooLarge
	}
	x.in, x.call, x.queued = x.in[:0], "", false
	for {
		if len(x.in) == cap(x.in) {
			x.in = append(x.in, 0)[:len(x.in)]
		}
		n, err := r.Body.Read(x.in[len(x.in):cap(x.in)])
		x.in = x.in[:len(x.in)+n]
		switch {
		case len(x.in) > BodyLimit:
			return errTooLarge
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return badRequest("the body broke off: " + err.Error())
		}
	}
}

// send answers 200 with x.out.
func (x *exchange) send(w http.ResponseWriter) {
	h := w.Header()
	h["Content-Type"] = valueJSON
	if x.call != "" {
		h[HeaderCall] = []string{x.call}
	}
	if len(x.out) > 2048 { // net/http counts shorter ones itself
		h.Set("Content-Length", strconv.Itoa(len(x.out)))
	}
	if x.queued {
		w.WriteHeader(http.StatusAccepted)
	}
	_, _ = w.Write(x.out) // the client is gone if this fails
}

// callRequest is the body of a tool call. It points into the bytes it was
// decoded from.
type callRequest struct {
	arguments    []byte // a JSON object, or nil
	timeout      string
	confirmation string
	later        string
}

// decodeCall reads a tool call strictly. No bytes at all are a call without
// arguments.
func decodeCall(body []byte) (c callRequest, err error) {
	err = decode(body, member{name: "arguments", object: &c.arguments}, member{name: "timeout", text: &c.timeout},
		member{name: "confirmation", text: &c.confirmation}, member{name: "later", text: &c.later})
	return c, err
}

// rpcRequest is the body of a raw request.
type rpcRequest struct {
	method       string
	params       []byte // a JSON object, or nil
	timeout      string
	confirmation string
}

func decodeRPC(body []byte) (c rpcRequest, err error) {
	err = decode(body, member{name: "method", text: &c.method}, member{name: "params", object: &c.params},
		member{name: "timeout", text: &c.timeout}, member{name: "confirmation", text: &c.confirmation})
	return c, err
}

// member is a member that a body may have: an object or a string.
type member struct {
	name   string
	object *[]byte
	text   *string
}

// decode reads the object in body, if there is one, into members, each of which it has at most once.
func decode(body []byte, into ...member) (err error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	seen := 0 // one bit for each member
	walk := jsonspan.Object(body)
	for walk.Next() {
		at := slices.IndexFunc(into, func(m member) bool { return m.name == string(walk.Key()) })
		if at < 0 {
			return unknownMember(walk.Key(), into)
		}
		m := &into[at]
		if m.object != nil {
			*m.object, err = object(walk.Value(), m.name)
		} else {
			*m.text, err = text(walk.Value(), m.name)
		}
		if err != nil {
			return err
		}
		if seen&(1<<at) != 0 {
			return badRequest(m.name + " is given twice")
		}
		seen |= 1 << at
	}
	switch err := walk.Err(); {
	case errors.Is(err, jsonspan.ErrType):
		return badRequest("the body must be a JSON object")
	case err != nil:
		return badRequest("the body is not usable: " + err.Error())
	}
	return nil
}

// unknownMember keeps nothing of known, so that what decode is given stays on the stack.
func unknownMember(key []byte, known []member) error {
	names := known[0].name
	for _, m := range known[1:] {
		names += ", " + m.name
	}
	return badRequest("the body has no member " + strconv.Quote(string(key)) + "; it takes " + names)
}

func object(value []byte, name string) ([]byte, error) {
	switch jsonspan.KindOf(value) {
	case jsonspan.KindObject:
		return value, nil
	case jsonspan.KindNull:
		return nil, nil
	}
	return nil, badRequest(name + " must be a JSON object")
}

func text(value []byte, name string) (string, error) {
	t, ok := jsonspan.String(value)
	if !ok {
		return "", badRequest(name + " must be a string")
	}
	return t, nil
}

// receive reads the body of a call. A large one is work of its caller.
func (s *Server) receive(x *exchange, r *http.Request) error {
	if units := connlimit.WorkOfBody(r, BodyLimit); units > 0 {
		if err := s.work(r, units); err != nil {
			return err
		}
	}
	return x.read(r)
}

// failCall answers a call that failed, which is work of its caller, too: one that only collects
// refusals waits for its rate.
func (s *Server) failCall(w http.ResponseWriter, r *http.Request, err error) {
	_ = s.work(r, 1) // the answer is err whatever it cost
	s.fail(w, r, err)
}

// work waits until the caller may have so many units of work done.
func (s *Server) work(r *http.Request, units int64) error {
	by := s.by(r, access.ViaREST)
	if by.Caller == nil { // the key ended after the token was checked
		return nil
	}
	return workError(s.opt.Work.BeginUnits(r.Context(), by.Caller.Key, units))
}

var errCallQuery = badRequest("a call takes no query; arguments, timeout, confirmation and later are members of the body")

// call is the hot path: one tool call.
func (s *Server) call(w http.ResponseWriter, r *http.Request) {
	x := exchanges.Get().(*exchange)
	defer x.free()
	if err := s.runCall(x, r); err != nil {
		s.failCall(w, r, err)
		return
	}
	x.send(w)
}

func (s *Server) runCall(x *exchange, r *http.Request) error {
	if r.URL.RawQuery != "" {
		return errCallQuery
	}
	id, err := parseDevice(r.PathValue("device"))
	if err != nil {
		return err
	}
	if err := s.receive(x, r); err != nil {
		return err
	}
	req, err := decodeCall(x.in)
	if err != nil {
		return err
	}
	c := devices.ToolCall{Device: id, Tool: r.PathValue("tool"), Arguments: req.arguments, Principal: s.by(r, access.ViaREST), Confirmation: req.confirmation}
	timeout, err := parseTimeout(req.timeout, dispatch.TimeoutFor(c.Tool))
	if err != nil {
		return err
	}
	if err := s.checkLater(r, req.later); err != nil {
		return err
	}
	if err := s.draining(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	var job api.Job
	if job, x.queued, err = s.queuedBefore(r, c, timeout, req.later); err != nil {
		return err
	}
	var result devices.ToolResult
	if !x.queued {
		if result, err = s.opt.Service.CallTool(ctx, c); err != nil && req.later != "" {
			job, x.queued, err = s.callLater(r, c, timeout, req.later, err)
		}
		if err != nil {
			return err
		}
	}
	if x.queued {
		x.out = append(x.out[:0], fmt.Sprintf(`{"job":%q}`+"\n", job.ID)...)
		return nil
	}
	x.call, x.out = result.Call, append(result.AppendResult(x.out[:0]), '\n')
	return nil
}

// mcp sends any MCP request but initialize.
func (s *Server) mcp(w http.ResponseWriter, r *http.Request, _ *DevicePath) {
	x := exchanges.Get().(*exchange)
	defer x.free()
	if err := s.runRPC(x, r); err != nil {
		s.failCall(w, r, err)
		return
	}
	x.send(w)
}

func (s *Server) runRPC(x *exchange, r *http.Request) error {
	id, err := parseDevice(r.PathValue("device"))
	if err != nil {
		return err
	}
	if err := s.receive(x, r); err != nil {
		return err
	}
	req, err := decodeRPC(x.in)
	if err != nil {
		return err
	}
	timeout, err := parseTimeout(req.timeout, dispatch.TimeoutFor(toolOf(req)))
	if err != nil {
		return err
	}
	if err := s.draining(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	result, err := s.opt.Service.CallRPC(ctx, devices.RPCCall{Device: id, Method: req.method, Params: req.params, Principal: s.by(r, access.ViaRaw), Confirmation: req.confirmation})
	if err != nil {
		return err
	}
	x.out = append(x.out[:0], `{"result":`...)
	answer := result.Result
	if answer == nil {
		x.out = append(x.out[:0], `{"error":`...)
		answer = result.Error
	}
	x.out = jsonspan.AppendString(append(append(x.out, answer...), `,"call":`...), result.Call)
	x.call, x.out = result.Call, append(x.out, "}\n"...)
	return nil
}

// toolOf is the tool that a raw request calls, empty if it calls none.
func toolOf(req rpcRequest) (tool string) {
	if req.method != "tools/call" {
		return ""
	}
	walk := jsonspan.Object(req.params)
	for walk.Next() {
		if string(walk.Key()) == "name" {
			tool, _ = jsonspan.String(walk.Value())
		}
	}
	return tool
}
