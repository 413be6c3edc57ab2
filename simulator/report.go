package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// deviceStats is what one device counts; guarded by the device's mutex.
type deviceStats struct {
	otaChecks, activations, upgrades     uint64
	connects, connectFailures            uint64
	disconnects, closeFrames, sendErrors uint64
	hellos, serverHellos, crashes        uint64
	reboots, notifications, pings        uint64
	calls, duplicates                    uint64
	executed                             idSet
	recorded                             []callRecord
	sessions                             []string
	messages                             []messageCount
	photos                               []photoRecord
	snapshots                            []snapshotRecord
	audio                                *audioStats
	// What only devices with MQTT have.
	conversations, goodbyesSent, goodbyesObeyed uint64
	mqtt                                        *mqttStats
	udp                                         *udpStats
}

type messageCount struct {
	name string
	n    uint64
}

// callRecord is one executed tool call.
type callRecord struct {
	ID   int32  `json:"id"`
	Tool string `json:"tool"`
}

// photoRecord is one camera upload and what the server said about it.
type photoRecord struct {
	SHA256   string `json:"sha256"`
	Bytes    int    `json:"bytes"`
	Question string `json:"question"`
	Status   int    `json:"status"`
	Answer   string `json:"answer"`
}

// snapshotRecord is one screen upload.
type snapshotRecord struct {
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
	Status int    `json:"status"`
}

// deviceReport is one device in the report; README.md explains every field.
type deviceReport struct {
	ID                  string            `json:"id"`
	ClientID            string            `json:"client_id"`
	Serial              string            `json:"serial_number,omitempty"`
	Clone               bool              `json:"clone,omitempty"`
	Profile             string            `json:"profile"`
	Board               string            `json:"board"`
	Firmware            string            `json:"firmware"`
	State               lifeState         `json:"state"`
	Error               string            `json:"error"`
	OTAChecks           uint64            `json:"ota_checks"`
	Activations         uint64            `json:"activations"`
	Upgrades            uint64            `json:"upgrades"`
	Reboots             uint64            `json:"reboots"`
	Crashes             uint64            `json:"crashes"`
	Connects            uint64            `json:"connects"`
	ConnectFailures     uint64            `json:"connect_failures"`
	Disconnects         uint64            `json:"disconnects"`
	CloseFrames         uint64            `json:"close_frames"`
	SendErrors          uint64            `json:"send_errors"`
	Hellos              uint64            `json:"hellos"`
	ServerHellos        uint64            `json:"server_hellos"`
	SessionIDs          []string          `json:"session_ids"`
	Tools               int               `json:"tools"`
	ToolsPublic         int               `json:"tools_public"`
	CatalogSHA256       string            `json:"catalog_sha256"`
	CatalogPublicSHA256 string            `json:"catalog_public_sha256"`
	Calls               []callRecord      `json:"calls"`
	CallsTotal          uint64            `json:"calls_total"`
	DuplicateCallIDs    uint64            `json:"duplicate_call_ids"`
	Notifications       uint64            `json:"notifications_sent"`
	Photos              []photoRecord     `json:"photos"`
	Snapshots           []snapshotRecord  `json:"snapshots"`
	Audio               audioReport       `json:"audio"`
	Pings               uint64            `json:"pings"`
	Noops               uint64            `json:"noops"`
	ServerMessages      map[string]uint64 `json:"server_messages"`
	Transport           string            `json:"transport"`
	Conversations       uint64            `json:"conversations"`
	GoodbyesSent        uint64            `json:"goodbyes_sent"`
	GoodbyesReceived    uint64            `json:"goodbyes_received"`
	CONNACKCodes        map[string]uint64 `json:"connack_codes,omitempty"`
	MQTTReconnects      uint64            `json:"mqtt_reconnects"`
	KeepalivePings      uint64            `json:"keepalive_pings"`
	UDPSSRC             string            `json:"udp_ssrc,omitempty"`
	UDP                 *udpReport        `json:"udp,omitempty"`
	Volume              int32             `json:"volume"`
	ClockMS             int64             `json:"clock_ms"`
}

// percentiles are milliseconds.
type percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

type totals struct {
	Devices          int               `json:"devices"`
	Connected        int               `json:"connected"`
	States           map[lifeState]int `json:"states"`
	OTAChecks        uint64            `json:"ota_checks"`
	Connects         uint64            `json:"connects"`
	ConnectFailures  uint64            `json:"connect_failures"`
	Disconnects      uint64            `json:"disconnects"`
	Hellos           uint64            `json:"hellos"`
	ServerHellos     uint64            `json:"server_hellos"`
	Reboots          uint64            `json:"reboots"`
	Crashes          uint64            `json:"crashes"`
	CallsTotal       uint64            `json:"calls_total"`
	DuplicateCallIDs uint64            `json:"duplicate_call_ids"`
	Notifications    uint64            `json:"notifications_sent"`
	Photos           int               `json:"photos"`
	Snapshots        int               `json:"snapshots"`
	FramesSent       uint64            `json:"frames_sent"`
	FramesReceived   uint64            `json:"frames_received"`
	Pings            uint64            `json:"pings"`
	Noops            uint64            `json:"noops"`
	HelloMS          percentiles       `json:"hello_ms"`
	Transports       map[string]int    `json:"transports"`
	Conversations    uint64            `json:"conversations"`
	GoodbyesSent     uint64            `json:"goodbyes_sent"`
	GoodbyesReceived uint64            `json:"goodbyes_received"`
	CONNACKCodes     map[string]uint64 `json:"connack_codes"`
	MQTTReconnects   uint64            `json:"mqtt_reconnects"`
	KeepalivePings   uint64            `json:"keepalive_pings"`
	ConnectWait      percentiles       `json:"connect_wait"`
	ReconnectWait    percentiles       `json:"reconnect_wait"`
	UDP              udpReport         `json:"udp"`
	audioCounts
}

// runReport is the whole report.
type runReport struct {
	seed           uint64
	started, ended time.Time
	devices        []deviceReport
	totals         totals
}

// recordCall notes a tool call the device executes, and whether it executed that id before in its life.
func (d *device) recordCall(id int32, name string) {
	d.fleet.callsTotal.Add(1)
	keep := d.fleet.callsLeft.Add(-1) >= 0
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stats.calls++
	if !d.stats.executed.add(id) {
		d.stats.duplicates++
	}
	if keep {
		d.stats.recorded = append(d.stats.recorded, callRecord{ID: id, Tool: name})
	}
}

// report copies the device's figures.
func (d *device) report() deviceReport {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &d.stats
	r := deviceReport{
		ID: d.id, ClientID: d.clientID, Serial: d.serial, Clone: d.clone, Profile: d.profile.name, Board: d.profile.board,
		Firmware: d.version, State: d.life, Error: d.problem,
		OTAChecks: s.otaChecks, Activations: s.activations, Upgrades: s.upgrades, Reboots: s.reboots, Crashes: s.crashes,
		Connects: s.connects, ConnectFailures: s.connectFailures, Disconnects: s.disconnects, CloseFrames: s.closeFrames,
		SendErrors: s.sendErrors, Hellos: s.hellos, ServerHellos: s.serverHellos,
		SessionIDs: append([]string{}, s.sessions...),
		Tools:      d.tools.count, ToolsPublic: d.tools.publicCount,
		CatalogSHA256: d.tools.sha, CatalogPublicSHA256: d.tools.publicSHA,
		Calls: append([]callRecord{}, s.recorded...), CallsTotal: s.calls, DuplicateCallIDs: s.duplicates,
		Notifications: s.notifications, Photos: append([]photoRecord{}, s.photos...),
		Snapshots: append([]snapshotRecord{}, s.snapshots...), Pings: s.pings,
		ServerMessages: make(map[string]uint64, len(s.messages)), Volume: d.volume, ClockMS: int64(d.clock),
	}
	for _, m := range s.messages {
		r.ServerMessages[m.name] = m.n
		if m.name == "noop" {
			r.Noops = m.n
		}
	}
	d.reportAudioLocked(&r)
	d.reportMQTTLocked(&r)
	return r
}

// snapshot takes the report while the devices still live.
func (f *fleet) snapshot() *runReport {
	r := &runReport{seed: f.options.seed, started: f.started, ended: time.Now(), devices: make([]deviceReport, len(f.devices))}
	t := &r.totals
	t.Devices, t.States = len(f.devices), make(map[lifeState]int)
	t.Transports, t.CONNACKCodes = make(map[string]int), make(map[string]uint64)
	for i, d := range f.devices {
		r.devices[i] = d.report()
		v := &r.devices[i]
		t.States[v.State]++
		t.OTAChecks += v.OTAChecks
		t.Connects += v.Connects
		t.ConnectFailures += v.ConnectFailures
		t.Disconnects += v.Disconnects
		t.Hellos += v.Hellos
		t.ServerHellos += v.ServerHellos
		t.Reboots += v.Reboots
		t.Crashes += v.Crashes
		t.CallsTotal += v.CallsTotal
		t.DuplicateCallIDs += v.DuplicateCallIDs
		t.Notifications += v.Notifications
		t.Photos += len(v.Photos)
		t.Snapshots += len(v.Snapshots)
		t.FramesSent += v.Audio.FramesSent
		t.FramesReceived += v.Audio.FramesReceived
		t.addMQTT(v)
		t.Pings += v.Pings
		t.Noops += v.Noops
	}
	t.Connected = t.States[lifeConnected]
	f.mu.Lock()
	t.HelloMS = percentilesOf(slices.Clone(f.latencies))
	t.ConnectWait, t.ReconnectWait = percentilesOf(slices.Clone(f.connects)), percentilesOf(slices.Clone(f.returns))
	f.mu.Unlock()
	return r
}

// percentilesOf uses the nearest rank; it sorts its argument.
func percentilesOf(us []uint32) percentiles {
	if len(us) == 0 {
		return percentiles{}
	}
	slices.Sort(us)
	at := func(percent int) float64 { return float64(us[(len(us)*percent+99)/100-1]) / 1000 }
	return percentiles{P50: at(50), P99: at(99), Max: at(100)}
}

// writeJSON writes one document, device by device, so that a big fleet needs no second copy in memory.
func (r *runReport) writeJSON(w *bufio.Writer) error {
	_, err := fmt.Fprintf(w, "{\"seed\":%d,\"started\":%q,\"ended\":%q,\"devices\":[", r.seed,
		r.started.UTC().Format(time.RFC3339Nano), r.ended.UTC().Format(time.RFC3339Nano))
	if err != nil {
		return err
	}
	for i := range r.devices {
		line, err := json.Marshal(&r.devices[i])
		if err != nil {
			return err
		}
		if i > 0 {
			_ = w.WriteByte(',')
		}
		_ = w.WriteByte('\n')
		_, _ = w.Write(line)
	}
	sum, err := json.Marshal(&r.totals)
	if err != nil {
		return err
	}
	// bufio keeps the first write error and returns it from the last call.
	_, err = fmt.Fprintf(w, "\n],\"totals\":%s}\n", sum)
	return err
}

// writeText writes a few lines for a person.
func (r *runReport) writeText(w *bufio.Writer) error {
	t := &r.totals
	_, err := fmt.Fprintf(w, "%d devices in %.1f s, seed %d\n", t.Devices, r.ended.Sub(r.started).Seconds(), r.seed)
	if err != nil {
		return err
	}
	states := make([]string, 0, len(t.States))
	for s := range t.States {
		states = append(states, string(s))
	}
	slices.Sort(states)
	for _, s := range states {
		fmt.Fprintf(w, "  %-22s %d\n", s, t.States[lifeState(s)])
	}
	fmt.Fprintf(w, "OTA checks %d, connects %d (%d failed), disconnects %d, reboots %d, crashes %d\n",
		t.OTAChecks, t.Connects, t.ConnectFailures, t.Disconnects, t.Reboots, t.Crashes)
	fmt.Fprintf(w, "wait for server hello: p50 %.1f ms, p99 %.1f ms, max %.1f ms\n", t.HelloMS.P50, t.HelloMS.P99, t.HelloMS.Max)
	fmt.Fprintf(w, "calls %d (%d ids twice), notifications %d, photos %d, snapshots %d, audio frames %d up %d down\n",
		t.CallsTotal, t.DuplicateCallIDs, t.Notifications, t.Photos, t.Snapshots, t.FramesSent, t.FramesReceived)
	t.writeMQTT(w)
	problems := map[string]int{}
	for i := range r.devices {
		if p := r.devices[i].Error; p != "" {
			problems[p]++
		}
	}
	keys := make([]string, 0, len(problems))
	for p := range problems {
		keys = append(keys, p)
	}
	slices.SortFunc(keys, func(a, b string) int { return problems[b] - problems[a] })
	for i, p := range keys {
		if i == 10 {
			fmt.Fprintf(w, "  and %d other problems\n", len(keys)-i)
			break
		}
		fmt.Fprintf(w, "  %d x %s\n", problems[p], p)
	}
	return nil
}
