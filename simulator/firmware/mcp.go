package firmware

import (
	"bytes"
	"errors"
	"strconv"
	"time"
)

// errUnescaped is the message of the fault unescaped-error: quotes and a line break, which make the envelope invalid.
var errUnescaped = errors.New("no \"film\" left in C:\\camera\nplease reload")

// foreignID is the first id of replies that answer nobody.
const foreignID = 1_900_000_000

// onMCP is McpServer::ParseMessage (main/mcp_server.cc:350-433) plus the faults around it. payload is an object.
func (d *Device) onMCP(payload value) {
	switch {
	case d.faults.has(faultSilent):
		return
	case d.faults.has(faultSlow):
		d.later(d.fleet.options.Slow, payload)
	case d.faults.has(faultLateReply) && string(payload.get("method").bytes()) == "tools/call":
		d.later(d.fleet.options.Late, payload)
	default:
		d.handleMCP(payload)
	}
}

// later handles a copy of the request after a delay. The reply goes to whatever socket is open then.
func (d *Device) later(delay time.Duration, payload value) {
	text := bytes.Clone(payload.doc.src)
	d.fleet.after(delay, func() {
		var doc jsonDoc
		root, err := doc.parse(text)
		if err != nil {
			return
		}
		d.handleMCP(root.get("payload"))
		d.pump(false)
	})
}

func (d *Device) handleMCP(m value) {
	if version := m.get("jsonrpc"); string(version.bytes()) != "2.0" {
		return
	}
	method := m.get("method")
	if !method.is(jsonString) || bytes.HasPrefix(method.bytes(), []byte("notifications")) {
		return
	}
	params := m.get("params")
	if params.ok() && !params.is(jsonObject) {
		return
	}
	idNode := m.get("id")
	if !idNode.is(jsonNumber) {
		return
	}
	id := idNode.int32()
	switch string(method.bytes()) {
	case "initialize":
		d.initialize(params.get("capabilities"))
		d.post(job{kind: jobResult, id: id, text: d.initializeResult()})
	case "tools/list":
		user := params.get("withUserTools").is(jsonTrue) && d.profile.userTools
		p := d.tools.page(params.get("cursor").string(), user, d.faults.has(faultCursorLoop))
		if p.err != "" {
			d.replyError(id, p.err)
			return
		}
		d.post(job{kind: jobResult, id: id, text: p.result})
	case "tools/call":
		d.callTool(id, params)
	default:
		d.replyError(id, "Method not implemented: "+method.string())
	}
}

func (d *Device) replyError(id int32, message string) {
	d.post(job{kind: jobError, id: id, text: message})
}

func (d *Device) initializeResult() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return `{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"` +
		d.runs.board + `","version":"` + d.runs.version + `"}}`
}

// initialize is McpServer::ParseCapabilities: only a string url changes anything, and it clears a token not given.
func (d *Device) initialize(capabilities value) {
	if !capabilities.is(jsonObject) || d.tools.byName[takePhotoName] == nil {
		return
	}
	vision := capabilities.get("vision")
	if !vision.is(jsonObject) || !vision.get("url").is(jsonString) {
		return
	}
	d.mu.Lock()
	d.visionURL, d.visionToken = vision.get("url").string(), vision.get("token").string()
	d.mu.Unlock()
}

func (d *Device) callTool(id int32, params value) {
	if !params.ok() {
		d.replyError(id, "Missing params")
		return
	}
	name := params.get("name")
	if !name.is(jsonString) {
		d.replyError(id, "Missing name")
		return
	}
	given := params.get("arguments")
	if given.ok() && !given.is(jsonObject) {
		d.replyError(id, "Invalid arguments")
		return
	}
	t := d.tools.byName[string(name.bytes())]
	if t == nil {
		d.replyError(id, "Unknown tool: "+name.string())
		return
	}
	args, problem := t.arguments(given)
	if problem != "" {
		d.replyError(id, problem)
		return
	}
	d.post(job{kind: jobTool, id: id, tool: t, args: args, marker: given.get(markerArgument).string()})
}

// sendMCP composes Protocol::SendMcpMessage around a reply with the session id current now, which need not be the one
// of the request.
func (d *Device) sendMCP(id int32, before, body, after string) {
	d.mu.Lock()
	out, session := d.out, d.sessionID
	d.mu.Unlock()
	if out == nil {
		return
	}
	room := getBuffer()
	b := append(appendFrameRoom(*room), `{"session_id":"`...)
	b = append(append(b, session...), `","type":"mcp","payload":{"jsonrpc":"2.0","id":`...)
	b = strconv.AppendInt(b, int64(id), 10)
	*room = append(append(append(b, before...), body...), after...)
	d.write(out, opText, room)
}

// foreignReply sends what a robot's local control port makes the device broadcast: a reply to an id this server never
// used (main/boards/otto-robot/otto_robot.cc:228-241).
func (d *Device) foreignReply() {
	every := d.profile.foreignEvery
	if every == 0 {
		return
	}
	d.mu.Lock()
	n := d.stats.calls
	d.mu.Unlock()
	if n%uint64(every) == 0 {
		d.post(job{kind: jobResult, id: foreignID + int32(n/uint64(every)), text: outcome{text: "idle"}.resultJSON()})
	}
}

func (d *Device) notifyOnce() {
	d.mu.Lock()
	ready, stopped := d.opened && d.out != nil, d.stopped
	text := ""
	if ready {
		d.presses++
		d.stats.notifications++
		text = `{"session_id":"` + d.sessionID + `","type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/button_pressed","params":{"count":` +
			strconv.FormatUint(d.presses, 10) + `}}}`
	}
	d.mu.Unlock()
	if stopped {
		return
	}
	if ready {
		d.post(job{kind: jobText, text: text})
		d.pump(false)
	}
	d.fleet.after(d.jittered(d.fleet.options.Notify), d.notifyOnce)
}
