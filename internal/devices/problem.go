package devices

import (
	"strconv"
	"time"

	"fleetd/internal/jsonspan"
)

// statuses is the one table from codes to HTTP statuses and their phrases,
// which problem objects carry over REST and NATS alike.
var statuses = map[Code]struct {
	status int
	phrase string
}{
	CodeBadRequest:       {400, "Bad Request"},
	CodeUnauthorized:     {401, "Unauthorized"},
	CodeForbidden:        {403, "Forbidden"},
	CodeChanged:          {412, "Precondition Failed"},
	CodeToolDenied:       {403, "Forbidden"},
	CodeNotFound:         {404, "Not Found"},
	CodeDeviceUnknown:    {404, "Not Found"},
	CodeToolUnknown:      {404, "Not Found"},
	CodeDeviceOffline:    {409, "Conflict"},
	CodeSuperseded:       {409, "Conflict"},
	CodeTooLarge:         {413, "Request Entity Too Large"},
	CodeInvalidArguments: {422, "Unprocessable Entity"},
	CodeConfirmation:     {428, "Precondition Required"},
	CodeDeviceBusy:       {429, "Too Many Requests"},
	CodeInternal:         {500, "Internal Server Error"},
	CodeConnectionLost:   {502, "Bad Gateway"},
	CodeDeviceError:      {502, "Bad Gateway"},
	CodeUnavailable:      {503, "Service Unavailable"},
	CodeDeviceTimeout:    {504, "Gateway Timeout"},
}

// Status is the HTTP status of the code, and its phrase.
func (c Code) Status() (status int, phrase string) {
	s, ok := statuses[c]
	if !ok {
		s = statuses[CodeInternal]
	}
	return s.status, s.phrase
}

// TellsSent says whether a problem with this error states if bytes left for
// the device.
func (e *Error) TellsSent() bool {
	switch e.Code {
	case CodeSuperseded, CodeConnectionLost, CodeDeviceTimeout, CodeDeviceError:
		return true
	}
	return e.Sent
}

// AppendProblem appends the error as a problem object (RFC 9457) without a
// type: title, status, code and detail, and where they apply part, sent,
// outcome, rule, confirmation, and the faults as errors.
func (e *Error) AppendProblem(dst []byte) []byte {
	status, phrase := e.Code.Status()
	dst = append(dst, `{"title":`...)
	dst = jsonspan.AppendString(dst, phrase)
	dst = append(dst, `,"status":`...)
	dst = strconv.AppendInt(dst, int64(status), 10)
	dst = append(dst, `,"code":`...)
	dst = jsonspan.AppendString(dst, string(e.Code))
	dst = append(dst, `,"detail":`...)
	dst = jsonspan.AppendString(dst, e.Detail)
	if e.Part != "" {
		dst = append(dst, `,"part":`...)
		dst = jsonspan.AppendString(dst, e.Part)
	}
	if e.TellsSent() {
		dst = append(dst, `,"sent":`...)
		dst = strconv.AppendBool(dst, e.Sent)
	}
	if e.Outcome != "" {
		dst = append(dst, `,"outcome":`...)
		dst = jsonspan.AppendString(dst, e.Outcome)
	}
	if e.Rule != "" {
		dst = append(dst, `,"rule":`...)
		dst = jsonspan.AppendString(dst, e.Rule)
	}
	if e.Confirmation != "" {
		dst = append(dst, `,"confirmation":`...)
		dst = jsonspan.AppendString(dst, e.Confirmation)
	}
	if e.Call != "" {
		dst = append(dst, `,"call":`...)
		dst = jsonspan.AppendString(dst, e.Call)
	}
	for i, f := range e.Faults {
		sep := `,`
		if i == 0 {
			sep = `,"errors":[`
		}
		dst = append(dst, sep...)
		dst = append(dst, `{"pointer":`...)
		dst = jsonspan.AppendString(dst, f.Pointer)
		dst = append(dst, `,"detail":`...)
		dst = jsonspan.AppendString(dst, f.Detail)
		dst = append(dst, '}')
	}
	if len(e.Faults) > 0 {
		dst = append(dst, ']')
	}
	return append(dst, '}')
}

// ParseProblem reads a problem object back; ok is false if data is none.
func ParseProblem(data []byte) (e *Error, ok bool) {
	e = &Error{}
	walk := jsonspan.Object(data)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "code":
			text, isText := jsonspan.String(value)
			e.Code, ok = Code(text), isText
		case "detail":
			e.Detail, _ = jsonspan.String(value)
		case "part":
			e.Part, _ = jsonspan.String(value)
		case "outcome":
			e.Outcome, _ = jsonspan.String(value)
		case "rule":
			e.Rule, _ = jsonspan.String(value)
		case "confirmation":
			e.Confirmation, _ = jsonspan.String(value)
		case "call":
			e.Call, _ = jsonspan.String(value)
		case "sent":
			e.Sent = jsonspan.KindOf(value) == jsonspan.KindTrue
		case "errors":
			faults := jsonspan.Array(value)
			for faults.Next() {
				var f Fault
				inner := jsonspan.Object(faults.Value())
				for inner.Next() {
					switch string(inner.Key()) {
					case "pointer":
						f.Pointer, _ = jsonspan.String(inner.Value())
					case "detail":
						f.Detail, _ = jsonspan.String(inner.Value())
					}
				}
				e.Faults = append(e.Faults, f)
			}
		}
	}
	return e, ok && walk.Err() == nil
}

// AppendResult appends the result as REST and NATS answer it.
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

// ParseResult reads what AppendResult wrote; ok is false if data is none.
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
