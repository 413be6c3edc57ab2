package devices

import (
	"encoding/json"
	"strconv"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/jsonspan"
)

// codeInfo is the HTTP status of a code, as in problem objects over REST and NATS, and
// its text in the reference.
type codeInfo struct {
	status  int
	phrase  string
	meaning string
}

var codes = map[Code]codeInfo{
	CodeBadRequest:       {400, "Bad Request", "The request is malformed: the detail names the member or parameter. Correct it."},
	CodeUnauthorized:     {401, "Unauthorized", "No token, or one that is not valid. Give an API key or the admin token."},
	CodeForbidden:        {403, "Forbidden", "The key does not have the scope, or is limited to other devices or tools; `rule` names the rule."},
	CodeStale:            {412, "Precondition Failed", "Somebody else changed it since the revision in `If-Match`. Read it again."},
	CodeToolDenied:       {403, "Forbidden", "The policy denies this tool; `rule` names the rule."},
	CodeNotFound:         {404, "Not Found", "There is nothing with this id or at this path."},
	CodeDeviceUnknown:    {404, "Not Found", "The fleet has no device with this id."},
	CodeToolUnknown:      {404, "Not Found", "The device has no tool of this name; its tools are listed again."},
	CodeMethodNotAllowed: {405, "Method Not Allowed", "The path has no such method; the header `Allow` names those that it has."},
	CodeDeviceOffline:    {409, "Conflict", "The device is a member but not connected."},
	CodeSuperseded:       {409, "Conflict", "The device connected again during the call; `sent` and `outcome` report whether it may have acted."},
	CodeConflict:         {409, "Conflict", "The job, the webhook or the image is in another state than the request needs, or the `Idempotency-Key` was used with another body."},
	CodeNotEligible:      {409, "Conflict", "No device of the selection may get the firmware image, or be brought back; the detail has a reason, and `GET /v1/firmware/check` those of each device."},
	CodeLimitReached:     {409, "Conflict", "The fleet has, or this key holds, as many as it may; the detail names the limit. End some, or wait until some end."},
	CodeTooLarge:         {413, "Request Entity Too Large", "The body or value is larger than the limit in the detail."},
	CodeInvalidArguments: {422, "Unprocessable Entity", "The arguments do not fit the tool's schema; `errors` has every fault with its JSON pointer."},
	CodeImageInvalid:     {422, "Unprocessable Entity", "The file must not be given to devices; `findings` has every fault, with what to do."},
	CodeConfirmation:     {428, "Precondition Required", "A person has to agree: repeat the same call within 60 s with the `confirmation` of this answer."},
	CodeDeviceBusy:       {429, "Too Many Requests", "More calls or messages wait for this device than it may hold. Try again later."},
	CodeQueueFull:        {429, "Too Many Requests", "The 100 places in the queue of this device are taken, or this key's share of them. Wait for some of its tasks to end, or cancel them."},
	CodeRateLimited:      {429, "Too Many Requests", "The key or the address makes too many requests, or has too many of them, of streams or of sessions open at once. Wait as long as `Retry-After` says, or close some."},
	CodeInternal:         {500, "Internal Server Error", "An internal error (bug); the node's log has the cause. Please report it."},
	CodeConnectionLost:   {502, "Bad Gateway", "The connection to the device broke during the call; `outcome` is `unknown` if bytes had left."},
	CodeDeviceError:      {502, "Bad Gateway", "The device answered with an error, or with a malformed message."},
	CodeUnavailable:      {503, "Service Unavailable", "The node is stopping, or a part that the request needs is unreachable; `part` names it. Try again later."},
	CodeDeviceTimeout:    {504, "Gateway Timeout", "The device did not answer in time; it may have acted (`outcome` is `unknown`)."},
}

// Status returns the HTTP status of the code and its phrase.
func (c Code) Status() (status int, phrase string) {
	s, ok := codes[c]
	if !ok {
		s = codes[CodeInternal]
	}
	return s.status, s.phrase
}

// ReportsSent reports whether the problem object of this error has the member sent.
func (e *Error) ReportsSent() bool {
	switch e.Code {
	case CodeSuperseded, CodeConnectionLost, CodeDeviceTimeout, CodeDeviceError:
		return true
	}
	return e.Sent
}

// Problem is the error as a problem document.
func (e *Error) Problem() *api.Problem {
	status, phrase := e.Code.Status()
	p := &api.Problem{Title: phrase, Status: status, Code: string(e.Code), Detail: e.Detail, Part: e.Part, Outcome: e.Outcome,
		Rule: e.Rule, Confirmation: e.Confirmation, Errors: e.Faults, Findings: e.Findings, Call: e.Call}
	if e.ReportsSent() {
		p.Sent = &e.Sent
	}
	return p
}

// ParseProblem parses a problem document; ok is false if data is not one.
func ParseProblem(data []byte) (e *Error, ok bool) {
	if jsonspan.Member(data, "code") == nil { // a long result is not decoded
		return nil, false
	}
	var p api.Problem
	if err := json.Unmarshal(data, &p); err != nil {
		return nil, false
	}
	return &Error{Code: Code(p.Code), Detail: p.Detail, Part: p.Part, Sent: p.Sent != nil && *p.Sent, Outcome: p.Outcome,
		Rule: p.Rule, Confirmation: p.Confirmation, Faults: p.Errors, Call: p.Call}, true
}

// AppendResult appends the result in the form of REST and NATS.
func (r ToolResult) AppendResult(dst []byte) []byte {
	dst = append(dst, `{"content":`...)
	if len(r.Content) == 0 {
		dst = append(dst, "[]"...)
	}
	dst = append(dst, r.Content...)
	dst = append(dst, `,"isError":`...)
	dst = strconv.AppendBool(dst, r.IsError)
	if r.Outcome != "" {
		dst = append(dst, `,"outcome":`...)
		dst = jsonspan.AppendString(dst, r.Outcome)
	}
	dst = append(dst, `,"duration_ms":`...)
	dst = strconv.AppendFloat(dst, float64(r.Duration.Microseconds())/1000, 'f', -1, 64)
	dst = append(dst, `,"node":`...)
	dst = jsonspan.AppendString(dst, r.Node)
	if r.Call != "" {
		dst = append(dst, `,"call":`...)
		dst = jsonspan.AppendString(dst, r.Call)
	}
	return append(dst, '}')
}

// ParseResult parses the result of AppendResult; ok is false if data is not one.
func ParseResult(data []byte) (r ToolResult, ok bool) {
	walk := jsonspan.Object(data)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "content":
			r.Content, ok = value, jsonspan.KindOf(value) == jsonspan.KindArray
		case "isError":
			r.IsError = jsonspan.KindOf(value) == jsonspan.KindTrue
		case "outcome":
			r.Outcome, _ = jsonspan.String(value)
		case "node":
			r.Node, _ = jsonspan.String(value)
		case "call":
			r.Call, _ = jsonspan.String(value)
		case "duration_ms":
			if ms, err := strconv.ParseFloat(string(value), 64); err == nil {
				r.Duration = time.Duration(ms * float64(time.Millisecond))
			}
		}
	}
	return r, ok && walk.Err() == nil
}
