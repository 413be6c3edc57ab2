package devices

import (
	"strconv"
	"time"

	"fleetd/internal/jsonspan"
)

// statuses is the one table from codes to HTTP statuses, which problem objects
// carry over REST and NATS alike.
var statuses = map[Code]int{
	CodeBadRequest: 400, CodeUnauthorized: 401, CodeForbidden: 403, CodeToolDenied: 403, CodeNotFound: 404, CodeDeviceUnknown: 404,
	CodeToolUnknown: 404, CodeDeviceOffline: 409, CodeSuperseded: 409, CodeTooLarge: 413, CodeInvalidArguments: 422,
	CodeConfirmation: 428, CodeDeviceBusy: 429, CodeInternal: 500, CodeConnectionLost: 502, CodeDeviceError: 502,
	CodeUnavailable: 503, CodeDeviceTimeout: 504,
}

// Status is the HTTP status of the code; 500 for one that is not in the table.
func (c Code) Status() int {
	if status, ok := statuses[c]; ok {
		return status
	}
	return 500
}

// AppendProblem appends the error as a problem object (RFC 9457): type, title,
// status, code and detail, and where they apply part, sent, outcome and the
// faults as errors.
func (e *Error) AppendProblem(dst []byte) []byte {
	dst = append(dst, `{"type":"about:blank","title":`...)
	dst = jsonspan.AppendString(dst, title(e.Code))
	dst = append(dst, `,"status":`...)
	dst = strconv.AppendInt(dst, int64(e.Code.Status()), 10)
	dst = append(dst, `,"code":`...)
	dst = jsonspan.AppendString(dst, string(e.Code))
	dst = append(dst, `,"detail":`...)
	dst = jsonspan.AppendString(dst, e.Detail)
	if e.Part != "" {
		dst = append(dst, `,"part":`...)
		dst = jsonspan.AppendString(dst, e.Part)
	}
	switch e.Code {
	case CodeSuperseded, CodeConnectionLost, CodeDeviceTimeout, CodeDeviceError:
		dst = append(dst, `,"sent":`...)
		dst = strconv.AppendBool(dst, e.Sent)
	}
	if e.Outcome != "" {
		dst = append(dst, `,"outcome":`...)
		dst = jsonspan.AppendString(dst, e.Outcome)
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

// title is the code in words.
func title(c Code) string {
	b := []byte(c)
	for i := range b {
		if b[i] == '_' {
			b[i] = ' '
		}
	}
	return string(b)
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
		case "duration_ms":
			if ms, err := strconv.ParseFloat(string(value), 64); err == nil {
				r.Duration = time.Duration(ms * float64(time.Millisecond))
			}
		}
	}
	return r, ok && walk.Err() == nil
}
