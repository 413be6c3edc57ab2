// Package api has the JSON types of the REST API, which the server writes and the
// client and the command line read: one declaration for each. The tags `doc`,
// `enum`, `example` and `nullable` are those of huma, from which the server makes
// docs/reference/openapi.json.
package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"
)

// Time is a time in RFC 3339 with milliseconds, UTC; the zero time is null.
type Time struct{ time.Time }

// At returns t as a Time.
func At(t time.Time) Time { return Time{t} }

// MarshalJSON implements json.Marshaler.
func (t Time) MarshalJSON() ([]byte, error) {
	return t.append(make([]byte, 0, len(`"2006-01-02T15:04:05.000Z"`))), nil
}

func (t Time) append(dst []byte) []byte {
	if t.IsZero() {
		return append(dst, "null"...)
	}
	at := t.UTC()
	dst = at.AppendFormat(append(dst, '"'), time.RFC3339) // several times as fast as a layout with a fraction
	ms := at.Nanosecond() / 1e6
	return append(dst[:len(dst)-1], '.', byte('0'+ms/100), byte('0'+ms/10%10), byte('0'+ms%10), 'Z', '"')
}

// UnmarshalJSON implements json.Unmarshaler; null is the zero time.
func (t *Time) UnmarshalJSON(data []byte) error {
	t.Time = time.Time{}
	if json.Unmarshal(data, &t.Time) != nil { // the error of package time shows its layout
		return errors.New("a time must be RFC 3339 text, such as \"2026-03-01T12:00:00Z\"")
	}
	return nil
}

// Selection is a selection of devices: text such as "room=lab", or an object of
// labels. It is not evaluated here, so that a client can read what a newer server
// sends.
type Selection struct {
	Text string
	JSON json.RawMessage // as received, or as to be sent in place of Text
}

// String returns the selection as text, of either form.
func (s Selection) String() string { return s.Text }

// IsZero reports whether all devices are selected.
func (s Selection) IsZero() bool { return s.Text == "" }

// MarshalJSON implements json.Marshaler.
func (s Selection) MarshalJSON() ([]byte, error) {
	if len(s.JSON) > 0 {
		return s.JSON, nil
	}
	return json.Marshal(s.Text)
}

// UnmarshalJSON implements json.Unmarshaler.
func (s *Selection) UnmarshalJSON(data []byte) error {
	*s = Selection{JSON: bytes.Clone(data)}
	var labels map[string]string
	if json.Unmarshal(data, &labels) != nil {
		if json.Unmarshal(data, &s.Text) != nil {
			return errors.New(`a selection must be text such as "room=lab", or an object of labels with texts`)
		}
		return nil
	}
	var terms []string
	for _, label := range slices.Sorted(maps.Keys(labels)) {
		terms = append(terms, label+"="+labels[label])
	}
	s.Text = strings.Join(terms, ",")
	return nil
}

// List is one page of a list.
type List[T any] struct {
	Items      []T    `json:"items" nullable:"false"`
	NextCursor string `json:"next_cursor" doc:"It continues the list: give it as cursor. It is empty on the last page."`
}

// Device is one device.
type Device struct {
	ID              string            `json:"id" doc:"aa:bb:cc:dd:ee:ff, or another name the device gave itself."`
	Name            string            `json:"name" doc:"The operator calls the device so."`
	Labels          map[string]string `json:"labels"`
	State           string            `json:"state" enum:"online,offline,pending,contested"`
	OfflineReason   string            `json:"offline_reason" doc:"It says why the last connection ended. It is empty unless it is offline."`
	OfflineSince    Time              `json:"offline_since" doc:"It says when it was last seen before it went offline. It is null unless it is offline, and if it never was connected."`
	Admission       string            `json:"admission" enum:"member,revoked," doc:"It is empty for a device that waits for approval and never was a member."`
	Transport       string            `json:"transport" doc:"It says how it is connected. It is empty if it is not."`
	TransportWanted string            `json:"transport_wanted" enum:"websocket,mqtt," doc:"It is offered this transport at its next OTA check. It is empty for the node's default."`
	Node            string            `json:"node" doc:"This node holds it, or held it last."`
	Board           string            `json:"board"`
	Firmware        string            `json:"firmware"`
	Client          string            `json:"client" doc:"The client that is admitted: 12 hex digits of a keyed hash of its Client-Id. Empty: the first client with a Client-Id is admitted."`
	ClientID        string            `json:"client_id,omitempty" doc:"The admitted Client-Id is a secret: only answers about one device have it, and only for administrators."`
	Pending         []PendingClient   `json:"pending" nullable:"false" doc:"These clients wait for approval as this device."`
	SessionID       string            `json:"session_id"`
	MCP             DeviceMCP         `json:"mcp"`
	Audio           DeviceAudio       `json:"audio"`
	Credentials     Credentials       `json:"credentials"`
	FirstSeen       Time              `json:"first_seen"`
	LastSeen        Time              `json:"last_seen" doc:"Now, while it is connected."`
	ConnectedAt     Time              `json:"connected_at" doc:"It is null unless the device is connected."`
	Revision        int64             `json:"revision" doc:"This is the revision of the last decision about it. The ETag has it, and If-Match takes it."`
}

// PendingClient is a client that waits for approval.
type PendingClient struct {
	Client  string `json:"client" doc:"It is made like the member client of a device. It is empty for a client that sends no Client-Id."`
	Address string `json:"address,omitempty" doc:"Its last OTA check came from this address. Only keys with devices:write see it."`
	Since   Time   `json:"since" doc:"It says when it got its activation code."`
}

// Approval names the client that is approved.
type Approval struct {
	Client string `json:"client,omitempty" pattern:"^([0-9a-f]{12})?$" doc:"The client to approve, as pending shows it, or one that was refused. Needed if another client is admitted, or several wait."`
}

// DeviceMCP is the state of a device's MCP server.
type DeviceMCP struct {
	State        string `json:"state" enum:"unknown,listing,ready,none,unresponsive,error"`
	Tools        int    `json:"tools" doc:"It says how many tools it has."`
	Catalog      string `json:"catalog" doc:"SHA-256 of its tool list; empty if it was never read."`
	CatalogState string `json:"catalog_state" enum:"ready,stale,unknown,none,error" doc:"ready means that the list was verified on this connection. stale means that it is known from before; its tools can be called."`
	Partial      bool   `json:"partial" doc:"The list could not be read to its end."`
	Error        string `json:"error"`
}

// DeviceAudio is a device's audio channel.
type DeviceAudio struct {
	Open    bool   `json:"open"`
	Packets uint64 `json:"packets"`
	Dropped uint64 `json:"dropped"`
}

// Credentials are those of a device, or of the fleet.
type Credentials struct {
	Generation    int64 `json:"generation" doc:"The device gets credentials of this generation at its next OTA check."`
	PreviousUntil Time  `json:"previous_until" doc:"Until then older ones are valid, too, unless the device comes with the new ones first. It is null if they are not."`
}

// DeviceEdit is a change of one device; members left out stay.
type DeviceEdit struct {
	Name            *string   `json:"name,omitempty" doc:"The name has at most 128 bytes."`
	Labels          LabelEdit `json:"labels,omitempty" doc:"They are merged into the labels of the device, which may have 64; null removes one."`
	TransportWanted *string   `json:"transport_wanted,omitempty" enum:"websocket,mqtt," doc:"The device is offered this transport at its next boot. It is empty for the node's default."`
}

// LabelEdit are labels to set; nil removes one.
type LabelEdit map[string]*string

// UnmarshalJSON implements json.Unmarshaler. Null would otherwise be taken for an edit that
// changes no labels.
func (e *LabelEdit) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return errors.New("labels must be an object, not null; null as the value of a label removes it")
	}
	return json.Unmarshal(data, (*map[string]*string)(e))
}

// EditedDevice is the answer to a DeviceEdit.
type EditedDevice struct {
	Device
	Applies string `json:"applies,omitempty" doc:"next boot, if transport_wanted was given."`
}

// SelectionEdit is a change of all devices of a selection.
type SelectionEdit struct {
	Labels          LabelEdit `json:"labels,omitempty" doc:"They are merged into the labels of each device; null removes one."`
	TransportWanted *string   `json:"transport_wanted,omitempty" enum:"websocket,mqtt," doc:"The devices are offered this transport at their next boot. It is empty for the node's default."`
}

// SelectionEdited is the answer to a SelectionEdit.
type SelectionEdited struct {
	Matched int `json:"matched" doc:"Devices that the selection selects and the key is for."`
	Changed int `json:"changed" doc:"So many of them are different now."`
}

// FleetCounts are the numbers of devices by their values.
type FleetCounts struct {
	Total         int64            `json:"total" doc:"Devices that are known. Those that wait for their first approval are not among them."`
	AsOf          Time             `json:"as_of" doc:"It says when they were counted."`
	State         map[string]int64 `json:"state" doc:"online and offline make up the total. revoked, pending and contested are counted beside these; pending includes devices that were never members."`
	OfflineReason map[string]int64 `json:"offline_reason" doc:"It counts the devices that are offline. As in all members below, other has the number of devices with any less frequent value, and an empty name that of those without one."`
	Transport     map[string]int64 `json:"transport" doc:"It counts the devices that are online."`
	Board         map[string]int64 `json:"board"`
	Firmware      map[string]int64 `json:"firmware"`
	Node          map[string]int64 `json:"node" doc:"It counts the devices that are online."`
	MCPState      map[string]int64 `json:"mcp_state"`
}

// Revocation is the answer to a revocation that the database did not take.
type Revocation struct {
	Recorded bool     `json:"recorded" doc:"It says whether it is in the database."`
	Nodes    []string `json:"nodes" nullable:"false" doc:"The nodes where it is in force. They record it when the database answers again."`
}

// Grace is how long rotated credentials stay valid.
type Grace struct {
	Grace string `json:"grace,omitempty" example:"30d" doc:"It is a duration such as 90m, 12h or 30d, from 1m to 365d. The default is 30d."`
}

// SecretRotation is how the fleet's secret is rotated.
type SecretRotation struct {
	AdminOnly bool   `json:"admin_only,omitempty" doc:"With true, the admin token alone is changed: devices, and what is sealed, stay as they are."`
	Grace     string `json:"grace,omitempty" example:"30d" doc:"It says how long devices that did not boot since keep their credentials: a duration from 1m to 365d. The default is 30d."`
}

// RotatedSecret is the answer to a SecretRotation.
type RotatedSecret struct {
	Secret        int64  `json:"secret" doc:"This is the number of the secret; 0 is the one of the settings."`
	Generation    int64  `json:"generation" doc:"All credentials of devices have this generation from now on."`
	PreviousUntil Time   `json:"previous_until,omitzero" doc:"The credentials before it end at this time."`
	AdminToken    string `json:"admin_token" doc:"This is the new token. The one of this request is not valid any more."`
}

// Change is one entry of the change log.
type Change struct {
	Revision int64           `json:"revision"`
	Device   string          `json:"device" doc:"It is empty for a decision about the fleet."`
	Aspect   string          `json:"aspect" doc:"It says what was decided: join, import, admission, client, generation, name, transport, serial or label:KEY of a device; key, policy or rotation of the fleet."`
	Value    json.RawMessage `json:"value" doc:"The value is JSON; null means that it was removed. For an API key it has the id and the name, for a policy the version."`
	Who      string          `json:"who" doc:"This is the id of the caller's key, or one of the words admin, open, device (it joined by itself) and expiry."`
	At       Time            `json:"at" doc:"It is by the clock of the node that decided."`
}

// Key is an API key without what proves it.
type Key struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Scopes  []string  `json:"scopes" nullable:"false"`
	Devices Selection `json:"devices" doc:"It says which devices the key is for. {} means all of them."`
	Tools   []string  `json:"tools" nullable:"false" doc:"The key may call the tools that match one of these globs. Without any it may call all tools."`
	State   string    `json:"state" enum:"valid,expired,revoked"`
	Created Time      `json:"created"`
	Expires Time      `json:"expires" doc:"It is null if that never happens."`
	Revoked Time      `json:"revoked" doc:"It is null if the key was not revoked."`
	Parent  string    `json:"parent,omitempty" doc:"A key of the console, or a grant, acts in the name of the key with this id, and ends with it; admin is the admin token."`
	Grant   *Grant    `json:"grant,omitempty" doc:"It is there if the key is a grant: what a person allowed an application to do over MCP."`
	// CreatedBy is a name, because the key of the creator may have ended.
	CreatedBy string `json:"created_by,omitempty" doc:"This is the name of the key that created it. Keys of earlier versions do not have it."`
}

// Grant is what is known of the application that has a grant.
type Grant struct {
	Host       string `json:"host" doc:"Host of the document by which the application names itself; of a registered application, that of its redirect."`
	Name       string `json:"name,omitempty" doc:"As the application calls itself. Nobody has checked it."`
	Registered bool   `json:"registered,omitempty" doc:"The application registered itself, so the host is what it claims."`
	Resource   string `json:"resource" doc:"Its tokens are valid at this path of MCP and below." example:"/mcp"`
	Used       Time   `json:"used" doc:"When the application took a token last. It is null while the database does not answer."`
	Address    string `json:"address,omitempty" doc:"From where that was."`
}

// CreatedKey is a new key with its token.
type CreatedKey struct {
	Key
	Token string `json:"token" doc:"The token is shown this once, and stored nowhere."`
}

// NewKey describes a new key.
type NewKey struct {
	Name    string     `json:"name" example:"lab dashboard" doc:"The name has 1 to 64 letters, digits, blanks and . _ @ -. Refusals and the audit quote it."`
	Scopes  []string   `json:"scopes" nullable:"false" doc:"devices:read, tools:call, tools:call:user, devices:write, events:read, audio, admin, photos:read, broker."`
	Devices Selection  `json:"devices,omitzero" doc:"The key sees and changes only these devices."`
	Tools   []string   `json:"tools,omitempty" doc:"The key may call only the tools that one of these globs matches."`
	Expires *time.Time `json:"expires,omitempty" doc:"Without it the key lasts until it is revoked."`
}

// Self is the caller.
type Self struct {
	Name    string    `json:"name"`
	Key     string    `json:"key" doc:"This is the id of the API key. It is admin for the admin token, and open where no token is required."`
	Scopes  []string  `json:"scopes" nullable:"false"`
	Devices Selection `json:"devices" doc:"It says which devices the key is for. {} means all of them."`
	Tools   []string  `json:"tools" nullable:"false" doc:"The key may call the tools that match one of these globs. Without any it may call all tools."`
	Expires Time      `json:"expires" doc:"It is null if that never happens."`
	Admin   bool      `json:"admin" doc:"The caller may do everything."`
	Through string    `json:"through,omitempty" doc:"Id of the console key that is used, if it is one."`
}

// NewConsoleCode describes a one-time code of the console, or one with which a person consents to an application.
type NewConsoleCode struct {
	For     string    `json:"for,omitempty" enum:"console,consent" doc:"A code for consent is entered on the page on which an application asks to use MCP, in place of a key. It is valid for 5 minutes, and for nothing else. Without the member the code is for the console."`
	Scopes  []string  `json:"scopes,omitempty" doc:"The key gets only these scopes of the caller. Without the member it gets all of them; an application gets those that it asks for."`
	Devices Selection `json:"devices,omitzero" doc:"With for consent: the application may get these devices alone."`
	Tools   []string  `json:"tools,omitempty" doc:"With for consent: the application may get the tools alone that one of these globs matches."`
}

// ConsoleCode is a one-time code.
type ConsoleCode struct {
	Code    string    `json:"code" doc:"It belongs into the address of the console: /console/#code=CODE. A code for consent is typed in."`
	Expires time.Time `json:"expires" doc:"Unless it is used before, which works once."`
}

// ConsoleLogin exchanges a one-time code for a key.
type ConsoleLogin struct {
	Code string `json:"code"`
}

// PolicyVersion is one version of the policy, without its rules.
type PolicyVersion struct {
	Version int64  `json:"version"`
	Changed Time   `json:"changed"`
	By      string `json:"by" doc:"Name of the key that wrote it."`
	Rules   int    `json:"rules"`
}

// AuditEntry is one entry of the audit.
type AuditEntry struct {
	Run       string          `json:"run" doc:"A run is one start of a node."`
	Node      string          `json:"node"`
	Seq       int64           `json:"seq" doc:"Counts the entries of the run, from 1."`
	At        time.Time       `json:"at" doc:"It began at this time."`
	Kind      string          `json:"kind"`
	Call      string          `json:"call,omitempty" doc:"The id of the call."`
	Action    string          `json:"action" doc:"The tool or method that was called, the message's type, or what was done."`
	Device    string          `json:"device,omitempty"`
	Key       string          `json:"key,omitempty"`
	Name      string          `json:"name,omitempty"`
	Via       string          `json:"via,omitempty"`
	From      string          `json:"from,omitempty"`
	Through   string          `json:"through,omitempty" doc:"Id of the console key that the caller used."`
	Digest    string          `json:"digest,omitempty" doc:"This is the SHA-256 of the arguments."`
	Arguments json.RawMessage `json:"arguments,omitempty" doc:"The arguments are recorded where the policy's audit_arguments names the tool."`
	Cut       bool            `json:"arguments_cut,omitempty"`
	Outcome   string          `json:"outcome"`
	Rule      string          `json:"rule,omitempty" doc:"This rule refused it."`
	Detail    string          `json:"detail,omitempty"`
	Held      string          `json:"held,omitempty" doc:"This node held the device, if it was another one."`
	Duration  int64           `json:"duration_ns,omitempty"`
	Count     int64           `json:"count,omitempty" doc:"It stands for so many entries."`
}

// NewChip is one line of an import of chip keys.
type NewChip struct {
	Serial string `json:"serial" doc:"This is the number that was burnt into the chip: 1 to 64 of [A-Za-z0-9._-]."`
	Key    string `json:"key" doc:"This is the eFuse block KEY0 in 64 hex digits. It is stored encrypted and never shown."`
	Device string `json:"device,omitempty" doc:"The chip proves this device. Without the member it proves the first one that it does."`
}

// NewChips is an import of chip keys.
type NewChips struct {
	Items []NewChip `json:"items" nullable:"false" doc:"The list has at most 1000 lines and 64 KiB. All are imported or none."`
}

// Imported is the answer to NewChips.
type Imported struct {
	Imported int `json:"imported"`
}

// Chip is one line of the list of chips.
type Chip struct {
	Serial     string `json:"serial"`
	Device     string `json:"device" doc:"The chip proves this device. It is empty until the first proof."`
	ImportedAt Time   `json:"imported_at"`
	BoundAt    Time   `json:"bound_at" doc:"It is null while the chip proves no device."`
}

// Photo is one stored upload.
type Photo struct {
	ID       string `json:"id"`
	Device   string `json:"device"`
	Question string `json:"question" doc:"The device was asked to look for this."`
	Bytes    int64  `json:"bytes"`
	SHA256   string `json:"sha256"`
	Kind     string `json:"kind" enum:"camera,snapshot"`
	TakenAt  Time   `json:"taken_at" doc:"It arrived at this time."`
}

// Node is one node.
type Node struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Started Time   `json:"started"`
	Devices int    `json:"devices" doc:"So many devices are connected."`
	API     string `json:"api" doc:"It says where its API is."`
}

// Diagnosis is what a device gets at its OTA check.
type Diagnosis struct {
	OTAURL string          `json:"ota_url" doc:"This is the URL to type into a device."`
	Device string          `json:"device"`
	Status int             `json:"status" doc:"This is the HTTP status of the reply."`
	Reply  json.RawMessage `json:"reply" doc:"The exact answer to its OTA check."`
	// PublicAPIURL is checked from where the caller is.
	PublicAPIURL string    `json:"public_api_url,omitempty" doc:"The address under which hosts reach MCP (--public-api-url), if it is given."`
	Findings     []Finding `json:"findings" nullable:"false" doc:"Settings that make devices unreachable, and others worth knowing."`
	Probe        *Probe    `json:"probe,omitempty" doc:"A download that takes the way of firmware images. Whoever fetches it learns what a proxy does to them."`
}

// Probe is a download for a check of the way to devices.
type Probe struct {
	URL    string `json:"url" doc:"It is valid for two minutes."`
	Size   int64  `json:"size" doc:"It has this size in bytes."`
	SHA256 string `json:"sha256"`
}

// Finding is one thing wrong, or worth knowing, about a setting.
type Finding struct {
	Severity string `json:"severity"`
	Setting  string `json:"setting"`
	Message  string `json:"message"`
}

// LogLevel is the level of a node's log.
type LogLevel struct {
	Level string `json:"level" enum:"debug,info,warn,error"`
}

// Readiness is the answer of /readyz.
type Readiness struct {
	Ready bool              `json:"ready"`
	Down  map[string]string `json:"down" nullable:"false" doc:"It says what is down, and why."`
}

// ToolList is a device's tools.
type ToolList struct {
	Catalog string            `json:"catalog" doc:"SHA-256 of the whole list."`
	State   string            `json:"state" enum:"ready,stale,unknown,none,error"`
	Partial bool              `json:"partial"`
	Items   []json.RawMessage `json:"items" nullable:"false" doc:"The tools, exactly as the device sent them."`
}

// StoredCatalog is a tool list by its hash.
type StoredCatalog struct {
	Catalog string            `json:"catalog"`
	Items   []json.RawMessage `json:"items" nullable:"false" doc:"The tools, exactly as the device sent them."`
}

// HistoryEntry is a catalog that a device had from some time on.
type HistoryEntry struct {
	Catalog  string `json:"catalog" doc:"SHA-256 of the tool list."`
	Firmware string `json:"firmware"`
	ELF      string `json:"elf_sha256" doc:"This is the SHA-256 of the firmware image."`
	Partial  bool   `json:"partial"`
	Since    Time   `json:"since"`
}

// ToolCall is the body of a tool call.
type ToolCall struct {
	Arguments map[string]json.RawMessage `json:"arguments,omitempty" doc:"The tool gets these arguments, as its inputSchema describes them."`
	Timeout   string                     `json:"timeout,omitempty" example:"10s" doc:"A Go duration, waiting included: 30s by default, 75s for camera tools, at most 300s."`

	Confirmation string `json:"confirmation,omitempty" doc:"An earlier answer confirmation_required contained it. This call, and no other, then passes once."`
	Later        string `json:"later,omitempty" example:"24h" doc:"If the device is not connected, the call becomes a job: it is made when the device is back, at most this much later, 1s to 30d. The answer is then 202 with the job. The key needs the scope jobs, too."`
}

// QueuedCall is the answer to a call that is made later.
type QueuedCall struct {
	Job string `json:"job" doc:"This is the id of the job."`
}

// ToolResult is the answer of a tool.
type ToolResult struct {
	Content    []json.RawMessage `json:"content" nullable:"false" doc:"MCP content items, as the device sent them."`
	IsError    bool              `json:"isError" doc:"The tool failed on the device; the content has the reason."`
	Outcome    string            `json:"outcome,omitempty" doc:"restarting means that the tool restarts the device, which therefore never answers."`
	DurationMS float64           `json:"duration_ms" doc:"Milliseconds, waiting included."`
	Call       string            `json:"call" doc:"The id of the call, in the audit and in logs; also in the header Fleetd-Call."`
	Node       string            `json:"node" doc:"This node held the device."`
}

// RPC is the body of any MCP request.
type RPC struct {
	Method  string                     `json:"method" example:"tools/list"`
	Params  map[string]json.RawMessage `json:"params,omitempty"`
	Timeout string                     `json:"timeout,omitempty" example:"10s"`

	Confirmation string `json:"confirmation,omitempty" doc:"It is the same as for a tool call."`
}

// RPCResult is a device's answer to an RPC: either Result or Error is there.
type RPCResult struct {
	Result json.RawMessage `json:"result,omitempty" doc:"JSON-RPC result of the device's answer."`
	Error  json.RawMessage `json:"error,omitempty" doc:"JSON-RPC error object of the device's answer, in place of result."`
	Call   string          `json:"call" doc:"The audit and logs have this id of the request; the header Fleetd-Call has it, too."`
}

// LineFault is a fault in a file. Line and Column count from 1, columns in bytes; Column is 0 if the fault
// concerns a whole line.
type LineFault struct {
	Line   int64  `json:"line"`
	Column int64  `json:"column"`
	Detail string `json:"detail"`
}

// ImportReport is the result of an import. Of a refused file it has the faults alone.
type ImportReport struct {
	Rows         int64       `json:"rows" doc:"The file has so many devices."`
	Created      int64       `json:"created"`
	Changed      int64       `json:"changed"`
	Unchanged    int64       `json:"unchanged"`
	FirstClients int64       `json:"first_clients" doc:"So many members have no client_id in the file: the first client that connects with the id is admitted, also with --admission approve."`
	Refused      int64       `json:"refused" doc:"So many rows have a fault."`
	Faults       []LineFault `json:"faults" nullable:"false" doc:"The list has at most 1000 faults."`
}

// AuditReport is the result of a verification.
type AuditReport struct {
	Intact  bool  `json:"intact" doc:"Nothing is missing between the blocks of any run, and none was changed."`
	Runs    int   `json:"runs" doc:"Nodes started so many times."`
	Blocks  int   `json:"blocks"`
	Entries int64 `json:"entries"`
	Dropped int64 `json:"dropped" doc:"Entries dropped while the database was unreachable, as recorded by the nodes."`
	// Headless and Unended are not faults: old blocks are deleted, nodes are running, and some are
	// killed.
	Headless int      `json:"headless" doc:"So many runs lack their beginning: it was deleted because of its age, or is before the requested time."`
	Unended  []string `json:"unended" nullable:"false" doc:"Runs without a recorded stop: they are still running, were killed, or their end is missing."`
	Faults   []string `json:"faults" nullable:"false" doc:"It says what is missing or was modified, at most 100."`
}
