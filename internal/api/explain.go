package api

// Why is why a device or a call is as it is.
type Why struct {
	Device   string     `json:"device" doc:"This is the id of a device."`
	Call     string     `json:"call,omitempty" doc:"A call has its id here."`
	State    string     `json:"state" doc:"A device is online, offline, pending or contested; it is unknown if it is not of this fleet. A call has its outcome here."`
	Well     bool       `json:"well" doc:"Nothing is wrong."`
	Cause    string     `json:"cause" doc:"The cause is a stable word; further ones may be added. docs/troubleshooting.md lists them with what to do." enum:"well,unknown,never_seen,boot_loop,crashed,upgrade_failed,stranger_refused,waiting_approval,revoked,wrong_token,old_generation,contested,cloned,connect_not_seen,wrong_endpoint,check_refused,hello_failed,protocol,too_large,slow,crowded,rate_limited,dead,gone,idle,restarting,node_lost,draining,asleep,mcp_silent,mcp_failed,tools_missing,udp_silent,main_loop_busy,flapping,policy_denied,confirmation_missing,confirmation_expired,arguments_refused,tool_unknown,device_offline,queue_full,waited_behind,not_sent,sent_no_answer,answered_late,connection_lost,superseded,device_error,answer_malformed,answer_too_large,camera_not_ready,hop_lost,caller_left"`
	Sentence string     `json:"sentence" doc:"It says the cause in words."`
	Certain  bool       `json:"certain" doc:"It is false if the cause is merely what fits best."`
	Evidence []Evidence `json:"evidence" nullable:"false" doc:"This is what was recorded, newest first."`
	Next     []string   `json:"next" nullable:"false" doc:"This is what to do, in this order."`
	Reach    []Reach    `json:"reach" nullable:"false" doc:"It says since when each node has records."`
	Missing  []string   `json:"missing" nullable:"false" doc:"Nodes that did not answer, and parts that could not be read: database, events."`
}

// OfflineCauses is one page of the devices that are offline, by cause.
type OfflineCauses struct {
	Groups     []OfflineCause `json:"groups" nullable:"false" doc:"The largest group is the first."`
	Explained  int            `json:"explained" doc:"It says how many devices this page has."`
	NextCursor string         `json:"next_cursor" doc:"It continues the list. It is empty when all devices have been explained."`
	Missing    []string       `json:"missing" nullable:"false" doc:"Nodes that did not answer."`
}

// OfflineCause is a cause with the devices of a page that have it.
type OfflineCause struct {
	Cause   string   `json:"cause" doc:"It is made like the member of an explained device."`
	Well    bool     `json:"well" doc:"Nothing is wrong."`
	Count   int      `json:"count" doc:"The group has so many devices."`
	Devices []string `json:"devices" nullable:"false" doc:"The list has their ids."`
	Next    []string `json:"next" nullable:"false" doc:"This is what to do, in this order. DEVICE stands for the id."`
}

// Evidence is something that was recorded.
type Evidence struct {
	At   Time   `json:"at"`
	Node string `json:"node" doc:"This node recorded it."`
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// Reach is since when a node has records.
type Reach struct {
	Node  string `json:"node"`
	Since Time   `json:"since"`
}

// Record is one record of what happened to a device. Of a call that another key made, a key without the scope admin
// sees when it was made, how long it took and how it ended.
type Record struct {
	At         Time   `json:"at"`
	Node       string `json:"node" doc:"This node recorded it."`
	Kind       string `json:"kind" enum:"ota.check,activation.try,connect.refused,connected,mcp.failed,catalog,deviation,udp,limit,closed,call"`
	Device     string `json:"device"`
	Cause      string `json:"cause,omitempty" doc:"It says why, or what the device was offered."`
	Text       string `json:"text,omitempty" doc:"It is a detail: an endpoint, a version, an error. Some details are the device's own words."`
	Address    string `json:"address,omitempty" doc:"The device had this address. Only keys with devices:write see it."`
	Transport  string `json:"transport,omitempty"`
	Generation int64  `json:"generation,omitempty" doc:"The credentials are of this generation."`
	DurationMS int64  `json:"duration_ms,omitempty" doc:"connected: until it was ready; closed: age of the session; call: its duration."`
	Calls      int    `json:"calls,omitempty" doc:"A record of the kind closed has the number of calls that were in progress."`
	Count      int    `json:"count" doc:"It says how many equal records were combined into this one."`
	Call       string `json:"call,omitempty" doc:"call: its id; only for the key that made it, and for admin."`
	Tool       string `json:"tool,omitempty" doc:"call: the tool, method or type of message; only for the key that made it, and for admin."`
}

// Log is one page of what happened to a device, or to devices that are not known.
type Log struct {
	Items      []Record `json:"items" nullable:"false" doc:"The newest is the first."`
	NextCursor string   `json:"next_cursor" doc:"It continues the list. It is empty when there are no older records."`
	Reach      []Reach  `json:"reach" nullable:"false" doc:"It says since when each node has records."`
	Missing    []string `json:"missing" nullable:"false" doc:"Nodes that did not answer."`
}

// RecordedCall is what the nodes recorded of a call.
type RecordedCall struct {
	Call    string     `json:"call"`
	Device  string     `json:"device"`
	Tool    string     `json:"tool" doc:"It is the tool, the method of a raw request, or the type of a message."`
	Key     string     `json:"key" doc:"This is the key of the caller."`
	Steps   []CallStep `json:"steps" nullable:"false" doc:"The list is in order of time. It has the records of the node that received the call, of the node that holds the device, and of an answer that came late."`
	Missing []string   `json:"missing" nullable:"false" doc:"Nodes that did not answer."`
}

// CallStep is what one node recorded of a call.
type CallStep struct {
	Node       string `json:"node"`
	At         Time   `json:"at" doc:"It says when the call began there."`
	Holder     bool   `json:"holder" doc:"The node holds the device."`
	DurationMS int64  `json:"duration_ms"`
	WaitedMS   int64  `json:"waited_ms" doc:"It waited so long for the device to finish earlier calls."`
	Ahead      string `json:"ahead,omitempty" doc:"This call ran on the device meanwhile. It is left out if the caller may not read it."`
	Sent       bool   `json:"sent" doc:"Bytes left for the device."`
	Late       bool   `json:"late" doc:"An answer that came after the caller had left."`
	Outcome    string `json:"outcome" doc:"ok, tool_error, restarting, sent (a message), or the code of an error."`
	Rule       string `json:"rule,omitempty" doc:"This rule refused it."`
	Detail     string `json:"detail,omitempty"`
	Bytes      int    `json:"bytes,omitempty" doc:"The answer has so many bytes."`
}
