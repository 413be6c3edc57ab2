package api

import "encoding/json"

// Problem is every refusal of the API, over HTTP and NATS: a problem document of RFC 9457 without
// `type`, which then counts as about:blank.
type Problem struct {
	Title   string `json:"title" doc:"This is the text of the status."`
	Status  int    `json:"status" doc:"This is the HTTP status."`
	Code    string `json:"code" doc:"The stable name of what went wrong."`
	Detail  string `json:"detail" doc:"It is a sentence for people."`
	Part    string `json:"part,omitempty" doc:"With the code unavailable it names the part that is down."`
	Sent    *bool  `json:"sent,omitempty" doc:"It says whether bytes of the call left for the device."`
	Outcome string `json:"outcome,omitempty" doc:"unknown means that the device may or may not have acted."`
	Rule    string `json:"rule,omitempty" doc:"With the codes forbidden, tool_denied and confirmation_required it names the rule that decided."`
	// Confirmation makes the same call pass once.
	Confirmation string  `json:"confirmation,omitempty" doc:"With the code confirmation_required: give it as confirmation in the same call within 60 s, once a person has agreed."`
	Errors       []Fault `json:"errors,omitempty" nullable:"false" doc:"With the code invalid_arguments the list has every fault with its JSON pointer into the arguments."`
	Call         string  `json:"call,omitempty" doc:"The id of the call, raw request or message that failed, in the audit and in logs; also in the header Fleetd-Call."`
	// Faults are those of a file.
	Faults  []LineFault `json:"faults,omitempty" nullable:"false" doc:"With the code invalid_arguments of an import the list has the faults of the file, at most 1000."`
	Refused int64       `json:"refused,omitempty" doc:"With faults it says how many rows have one."`
	// Findings are those of a firmware file.
	Findings []ImageFinding `json:"findings,omitempty" nullable:"false" doc:"With the code image_invalid the list has every fault of the file."`
}

// Fault is one invalid part of a call's arguments.
type Fault struct {
	Pointer string `json:"pointer"` // RFC 6901, into the arguments
	Detail  string `json:"detail"`
}

// Error is the code and the detail.
func (p *Problem) Error() string { return p.Code + ": " + p.Detail }

// JSON is the document.
func (p *Problem) JSON() []byte {
	text, err := json.Marshal(p)
	if err != nil { // cannot fail: it consists of strings and numbers
		return []byte(`{}`)
	}
	return text
}
