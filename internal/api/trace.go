package api

// NewTrace is the request for a trace.
type NewTrace struct {
	For     string `json:"for,omitempty" example:"10m" doc:"It says how long the trace lasts at most, from 1s to 24h. The default is 10m. The trace ends 30 s after its last reader left, too."`
	Payload bool   `json:"payload,omitempty" doc:"Include the messages themselves, 1 KiB of each, without the values of members whose names have password, token, secret or key. Needs the scope admin."`
}

// Trace is one that is running.
type Trace struct {
	ID        string   `json:"id"`
	Device    string   `json:"device"`
	Payload   bool     `json:"payload"`
	ExpiresAt Time     `json:"expires_at"`
	Missing   []string `json:"missing" nullable:"false" doc:"Nodes that did not answer: until they do, nothing of a device that is connected there is shown."`
}

// TraceEntry is one message, record or call of a traced device.
type TraceEntry struct {
	At      Time   `json:"at"`
	Node    string `json:"node" doc:"This node holds the device."`
	Device  string `json:"device"`
	Trace   string `json:"trace" doc:"This is the id of the trace."`
	Kind    string `json:"kind" enum:"received,sent,record,call" doc:"received and sent: a message of or to the device; record and call: as in its log."`
	Type    string `json:"type,omitempty" doc:"It is the type of a message, the kind of a record, or the tool or method of a call."`
	Method  string `json:"method,omitempty" doc:"This is the JSON-RPC method of an MCP message."`
	RPC     string `json:"rpc,omitempty" doc:"This is the JSON-RPC id of an MCP message."`
	Bytes   int    `json:"bytes,omitempty" doc:"The message has so many bytes."`
	Cause   string `json:"cause,omitempty" doc:"It is the reason of a record, or the outcome of a call."`
	Text    string `json:"text,omitempty" doc:"A detail of a record or call."`
	Call    string `json:"call,omitempty" doc:"Id of a call. Of a call that another key made, a key without the scope admin sees neither id, tool, key nor detail."`
	Key     string `json:"key,omitempty" doc:"The key with this id made the call."`
	Payload string `json:"payload,omitempty" doc:"The beginning of the message, if the trace has payloads."`
	Dropped uint64 `json:"dropped,omitempty" doc:"It says how many entries before this one were left out, because there were too many."`
}
