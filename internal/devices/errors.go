package devices

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/jsonspan"
)

// Code is the stable name of an error, as REST and NATS show it.
type Code string

// Codes. The table in problem.go maps them to HTTP statuses.
const (
	CodeBadRequest       Code = "bad_request"
	CodeTooLarge         Code = "too_large"
	CodeNotFound         Code = "not_found"
	CodeInvalidArguments Code = "invalid_arguments"
	CodeUnauthorized     Code = "unauthorized"
	CodeForbidden        Code = "forbidden"
	CodeStale            Code = "stale"
	CodeMethodNotAllowed Code = "method_not_allowed"
	CodeToolDenied       Code = "tool_denied"
	CodeConfirmation     Code = "confirmation_required"
	CodeDeviceUnknown    Code = "device_unknown"
	CodeToolUnknown      Code = "tool_unknown"
	CodeDeviceOffline    Code = "device_offline"
	CodeSuperseded       Code = "superseded"
	CodeConnectionLost   Code = "connection_lost"
	CodeDeviceBusy       Code = "device_busy"
	CodeDeviceError      Code = "device_error"
	CodeDeviceTimeout    Code = "device_timeout"
	CodeUnavailable      Code = "unavailable"
	CodeInternal         Code = "internal"
	CodeConflict         Code = "conflict"
	CodeNotEligible      Code = "not_eligible"
	CodeQueueFull        Code = "queue_full"
	CodeRateLimited      Code = "rate_limited"
	CodeLimitReached     Code = "limit_reached"
	CodeImageInvalid     Code = "image_invalid"
)

// OutcomeUnknown is the outcome of a call that was sent and not answered: the device
// may or may not have acted.
const OutcomeUnknown = "unknown"

// Fault is one invalid part of a call's arguments.
type Fault = api.Fault

// Error is an error with its stable code. Sent and Outcome are set if the call reached
// the device's connection.
type Error struct {
	Code    Code
	Detail  string // one sentence for people, with what to do if possible
	Part    string // with CodeUnavailable: the part that is unreachable
	Sent    bool   // whether bytes left for the device
	Outcome string // OutcomeUnknown if bytes left and no answer arrived
	Rule    string // the rule that refused the request, if one did
	// Confirmation, with CodeConfirmation, is the token that confirms the same call once.
	Confirmation string
	Faults       []Fault
	Findings     []api.ImageFinding // with CodeImageInvalid: every fault of the file
	Call         string             // id of the failed call; empty if the request did not become a call
}

// Error returns the code and the detail.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Detail }

// Is compares codes, so that errors.Is works with errors of other nodes.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Errorf returns an Error with this code and a formatted detail.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Detail: fmt.Sprintf(format, args...)}
}

// LimitReached returns the refusal of something of which the fleet has a number: what names it in the plural. See
// access.Share.
func LimitReached(what string, limit int64) *Error {
	return Errorf(CodeLimitReached, "the limit of %d %s is reached, or the share of it that this key may have; end some, or wait until some end", limit, what)
}

// CodeOf returns the code of an error, as AsError has it, or an empty one for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	return AsError(err).Code
}

// AsError returns err as *Error. A failure of the database becomes CodeUnavailable, whose detail tells a slow one from one that is away, ErrNotFound
// CodeNotFound, any other error CodeInternal.
func AsError(err error) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, ErrDatabase) && errors.Is(err, context.DeadlineExceeded):
		return &Error{Code: CodeUnavailable, Part: "database", Detail: "the database is slow, and did not answer in time; ask for less, or try again later"}
	case errors.Is(err, ErrDatabase):
		return &Error{Code: CodeUnavailable, Part: "database", Detail: "the database does not answer; try again later"}
	case errors.Is(err, ErrNotFound):
		return &Error{Code: CodeNotFound, Detail: "not found"}
	default:
		return &Error{Code: CodeInternal, Detail: err.Error()}
	}
}

// ErrOverloaded is returned by Conn.SendControl of package session when its queue is full.
var ErrOverloaded = errors.New("the connection's write queue is full")

// ErrHello is returned by Session.HandleControl of package session for a hello: the
// front end answers it if its transport allows more than one.
var ErrHello = errors.New("hello on an open session")

// ErrNoHolder is returned by a dispatch.Router if no node holds the device.
var ErrNoHolder = errors.New("no node holds the device")

// ErrConflict means that another change was committed first.
var ErrConflict = errors.New("it was changed by somebody else meanwhile")

// ErrBound is returned by the store of attestation keys if the serial number or the
// device is bound to another one already.
var ErrBound = errors.New("the serial number or the device is bound to another one already")

// Details of errors by which the recorder's reader tells causes apart that have one code.
const (
	DetailCancelled         = "the caller cancelled the request"
	DetailConfirmationEnded = "the confirmation belongs to another call, was used, or has expired"
)

// ClosedCall returns the error of a call whose session has ended; sent means that the
// device may have received it.
func ClosedCall(reason CloseReason, sent bool) *Error {
	e := &Error{Code: CodeConnectionLost, Sent: sent, Detail: "the device's connection ended: " + string(reason)}
	if reason == CloseSuperseded {
		e.Code, e.Detail = CodeSuperseded, "the device connected again during the call"
	}
	if reason == CloseDraining && !sent {
		e.Code, e.Part, e.Detail = CodeUnavailable, "node", "the node that holds the device is stopping, and the device reconnects to another node; try again"
	}
	if sent {
		e.Outcome = OutcomeUnknown
	}
	return e
}

// TimeoutCall returns the error of a call that timed out or was cancelled.
func TimeoutCall(ctx context.Context, sent bool) *Error {
	e := &Error{Code: CodeDeviceTimeout, Sent: sent, Detail: "the device did not answer in time"}
	if !sent {
		e.Detail = "the call was not sent in time: earlier calls are still running on the device"
	}
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		e.Detail = DetailCancelled
	}
	if sent {
		e.Outcome = OutcomeUnknown
	}
	return e
}

// Origin is where a request came to this node from.
type Origin uint8

// Origins.
const (
	// OriginCaller: from a caller, to any node. It is routed to the node that holds the
	// device, and recorded in the audit log.
	OriginCaller Origin = iota
	// OriginHolder: from a caller, on the device's own subject. It is recorded, and never
	// routed.
	OriginHolder
	// OriginNode: from another node, which records it. It is never routed.
	OriginNode
)

// ToolCall is a call of one tool of one device. Its context has the deadline, which
// includes waiting.
type ToolCall struct {
	ID        string // see CallIDs; if empty, the core creates one
	Device    ID
	Tool      string
	Arguments json.RawMessage  // a JSON object, or nil for none
	Principal access.Principal // not sent to the device
	Origin    Origin           `json:"-"`
	// Confirmation is the token of an earlier refusal with CodeConfirmation.
	Confirmation string

	// Late receives the answer if it arrives after the caller's deadline, or an error if
	// none will arrive. It may be nil. It is called at most once, and must not block.
	Late func(ToolResult, error) `json:"-"`

	// Job is the job whose task the call is, and Confirmed are the rules that a person has
	// confirmed for all its calls. They are only of calls by a Reservation of package dispatch.
	Job       string   `json:"-"`
	Confirmed []string `json:"-"`

	// Waited is how long the call waited for the device's slot, and Ahead the call that held
	// it then. The core sets them.
	Waited time.Duration `json:"-"`
	Ahead  string        `json:"-"`

	// Guard is the policy that permitted the call. The core sets it; it is not sent
	// between nodes.
	Guard *access.Guard `json:"-"`
}

// ToolResult is the result of a tool.
type ToolResult struct {
	Content  json.RawMessage // a JSON array of MCP content items
	IsError  bool
	Outcome  string // `restarting` for tools that restart the device, else empty
	Duration time.Duration
	Node     string
	Call     string // id, given by the node that received the call
}

// RPCCall is one MCP request other than initialize.
type RPCCall struct {
	ID        string // as in ToolCall
	Device    ID
	Method    string
	Params    json.RawMessage // a JSON object, or nil for none
	Principal access.Principal
	Origin    Origin
	// Confirmation is as in ToolCall, for tools/call.
	Confirmation string

	// Waited and Ahead are as in ToolCall.
	Waited time.Duration
	Ahead  string
}

// RPCResult is the device's answer: either Result or Error is set.
type RPCResult struct {
	Result json.RawMessage
	Error  json.RawMessage // the device's error object, with a code added if it has none
	Call   string          // id of the request
}

// RestartMessage is the message that restarts a device.
const RestartMessage = `{"type":"system","command":"reboot"}`

// Message is a JSON message for a device, other than MCP and hello.
type Message struct {
	ID        string // as in ToolCall
	Device    ID
	Body      json.RawMessage // an object with a string member `type`
	Principal access.Principal
	Origin    Origin
	Job       string `json:"-"` // as in ToolCall
}

// ToolList is a device's list of tools.
type ToolList struct {
	Catalog Hash
	State   CatalogState
	Partial bool
	Tools   []json.RawMessage // each exactly as the device sent it
}

// CheckText returns an error if a value contains a string that the device's JSON reader
// does not accept: it drops a message with a lone surrogate without an answer, and ends
// a string at a NUL. what names the value.
func CheckText(what string, value []byte) error {
	pointer, fault := jsonspan.FindTextFault(value)
	detail := ""
	switch fault {
	case jsonspan.TextOK:
		return nil
	case jsonspan.LoneSurrogate:
		detail = "has half of a surrogate pair, and the device drops the whole message; send both halves, or the character itself"
	case jsonspan.NUL:
		detail = `has the character \u0000: the device ends the text there; leave it out`
	}
	return &Error{Code: CodeInvalidArguments, Detail: "the " + what + " cannot be read by the device", Faults: []Fault{{Pointer: pointer, Detail: detail}}}
}
