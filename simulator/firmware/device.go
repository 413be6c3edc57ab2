package firmware

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"
)

// State is where a device is in its life, as the report names it.
type State string

const (
	StateBooting    State = "booting"
	StateWaiting    State = "waiting_activation"
	StateIdle       State = "idle"
	StateConnected  State = "connected"
	StateBootLoop   State = "boot_loop"
	StateHung       State = "hung"
	StateCrashed    State = "crashed"
	StateNoEndpoint State = "no_endpoint"
	StateFailed     State = "failed"
	StateConnecting State = "connecting"
	StateAway       State = "away"
	StateUpgrading  State = "upgrading"
)

// appState is the part of the firmware's state machine that audio depends on (main/device_state_machine.cc).
type appState uint8

const (
	appIdle appState = iota
	appListening
	appSpeaking
)

// errCrash marks what makes a real chip abort or read foreign memory in the middle of its work.
var errCrash = errors.New("crash")

// Device is one virtual device. It has no goroutine of its own while it waits: a reader exists while a socket is open,
// a main loop while it has something slow to do, everything else runs on timers.
type Device struct {
	fleet    *Fleet
	profile  *Profile
	tools    *toolset
	index    int
	id       string
	clientID string
	serial   string
	faults   fault
	clone    bool

	// mu guards all fields below. It is never held while sending or running a tool.
	mu sync.Mutex

	life    State
	problem string
	stopped bool
	away    bool // without power

	settings nvs
	slots    *slots   // nil: never upgraded
	runs     *program // in the slot that was booted
	rng      *rand.Rand

	// RAM, lost at every restart.
	conn        *wsConn
	out         link
	opened      bool // the device waits for nothing more on this socket
	errored     bool // SetError was called since the socket was opened
	wsVersion   int32
	sessionID   string
	helloSeen   bool
	helloWait   chan struct{}
	lastData    time.Time
	app         appState
	mode        string
	visionURL   string
	visionToken string
	clock       float64
	upgrading   bool       // an upgrade by tool failed: button and wake word do nothing
	mqtt        *mqttState // nil on a device that uses WebSocket
	playFrame   time.Duration
	bootedAt    time.Time

	// main loop
	jobs    []job
	spare   []job
	looping bool
	restart bool

	// board
	volume, brightness int32
	theme              string
	trims              []trim

	talk       talkState
	talkTimer  *time.Timer
	audioQueue int
	presses    uint64
	armed      bool // its timers run

	stats deviceStats
}

type trim struct {
	servo string
	value int32
}

// newDevice makes device number index of the fleet; a clone shares the address of the device it copies but has an
// identity of its own.
func newDevice(f *Fleet, index, model int, clone bool) *Device {
	o := f.options
	mac := formatMAC(o.MACBase + uint64(model))
	who := mac
	if clone {
		who += "/clone"
	}
	p := o.Profiles[model%len(o.Profiles)]
	d := &Device{
		fleet: f, profile: p, tools: p.tools, index: index, id: mac, clientID: uuid4(derive(o.Seed, who, "uuid")),
		faults: faultsOf(o.Faults, model), clone: clone, life: StateBooting, runs: p.factory,
		volume: 70, brightness: 75, theme: "light", wsVersion: 1, playFrame: frameDuration,
	}
	if clone {
		d.faults &^= faultClone
	}
	if p.serials && model%2 == 0 {
		d.serial = serialNumber(derive(o.Seed, who, "serial"))
	}
	if o.Serial != "" && model == 0 {
		d.serial = o.Serial
	}
	if d.faults.has(faultOversizeTool) {
		d.tools = p.oversize
	}
	if d.faults.has(faultHostileText) {
		d.profile, d.tools, d.runs = p.hostile, p.hostile.tools, p.hostile.factory
	}
	d.rng = derivedRand(o.Seed, who, "behaviour")
	return d
}

// efuseKey is the HMAC key burnt into the chip.
func (d *Device) efuseKey() [32]byte {
	if key := d.fleet.options.EfuseKey; key != nil && d.index == 0 {
		return *key
	}
	return derive(d.fleet.options.Seed, d.id, "efuse")
}

// ssid is the name of the device's network. One robot in eight sits in one whose quote breaks the OTA body.
func (d *Device) ssid() string {
	if d.profile.quotedSSID && d.index%8 == 7 {
		return `Anna"s \ lab`
	}
	return "lab-" + strconv.Itoa(d.index%16)
}

func (d *Device) rssi() int { return -45 - d.index%40 }

func (d *Device) systemInfo() systemInfo {
	d.mu.Lock()
	slot := 0
	if d.slots != nil {
		slot = d.slots.running
	}
	runs := d.runs
	d.mu.Unlock()
	return systemInfo{
		profile: d.profile, runs: runs, slot: slot, mac: d.id, clientID: d.clientID, ssid: d.ssid(),
		rssi: d.rssi(), channel: 1 + d.index%13, ip: "192.0.2." + strconv.Itoa(1+d.index%254),
	}
}

func (d *Device) identity() otaIdentity {
	d.mu.Lock()
	defer d.mu.Unlock()
	return otaIdentity{serial: d.serial, deviceID: d.id, clientID: d.clientID,
		agent: d.runs.board + "/" + d.runs.version, language: d.profile.language}
}

// random draws from the device's own stream.
func (d *Device) random(draw func(*rand.Rand) time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return draw(d.rng)
}

func (d *Device) jittered(t time.Duration) time.Duration {
	return d.random(func(r *rand.Rand) time.Duration { return jitter(r, t) })
}

// arm starts the timers of --wake and of --notify with the first boot; they run for the rest of the device's life.
// Stock firmware sends no notifications; builds with own code do.
func (d *Device) arm() {
	d.mu.Lock()
	armed := d.armed
	d.armed = true
	d.mu.Unlock()
	if armed {
		return
	}
	if every := d.fleet.options.Wake; every > 0 {
		d.fleet.after(d.jittered(every), d.wakeAgain)
	}
	if every := d.fleet.options.Notify; every > 0 {
		d.fleet.after(d.jittered(every), d.notifyOnce)
	}
}

// sleep is a pause of the firmware; false means that the simulation ends.
func (d *Device) sleep(t time.Duration) bool { return d.pause(d.fleet.scaled(t)) }

// pause is a sleep that --time-scale leaves alone.
func (d *Device) pause(t time.Duration) bool {
	if t <= 0 {
		return d.fleet.ctx.Err() == nil
	}
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-d.fleet.ctx.Done():
		return false
	}
}

// setLife notes a state and, when problem is not empty, why.
func (d *Device) setLife(s State, problem string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setLifeLocked(s, problem)
}

func (d *Device) setLifeLocked(s State, problem string) {
	if d.stopped || d.away {
		return
	}
	if d.upgrading {
		s = StateUpgrading
	}
	d.fleet.count(d.life, s)
	d.life = s
	if problem != "" {
		d.problem = problem
	}
}

// halt ends the device's life in a state it cannot leave: what a person would have to repair or what repeats forever.
func (d *Device) halt(s State, cause error) {
	d.mu.Lock()
	d.setLifeLocked(s, cause.Error())
	d.stopped = true
	drop := d.detachLocked()
	d.jobs = nil
	d.mu.Unlock()
	drop()
}

// detachLocked takes everything that is connected or armed away from the device and returns how to end it.
func (d *Device) detachLocked() (drop func()) {
	conn, m := d.conn, d.mqtt
	d.conn, d.out, d.opened, d.mqtt = nil, nil, false, nil
	d.hushLocked()
	if m != nil {
		m.stopTimers()
	}
	return func() {
		if conn != nil {
			conn.drop()
		}
		if m != nil && m.conn != nil {
			m.conn.drop()
		}
		if m != nil && m.channel != nil {
			m.channel.close()
		}
	}
}

// resetProtocol destroys the protocol object: no socket is left, nobody connects again before the next start.
func (d *Device) resetProtocol() {
	d.mu.Lock()
	drop := d.detachLocked()
	d.setLifeLocked(StateIdle, "")
	d.mu.Unlock()
	drop()
}

// fail turns an error of the device's own making into the state it leads to.
func (d *Device) fail(err error) {
	switch {
	case errors.Is(err, errHang):
		d.halt(StateHung, err)
	default:
		d.mu.Lock()
		d.stats.crashes++
		d.mu.Unlock()
		d.halt(StateCrashed, err)
	}
}

// note keeps the last thing that went wrong without ending anything.
func (d *Device) note(problem string) {
	d.mu.Lock()
	d.problem = problem
	d.mu.Unlock()
}

// reboot is esp_restart: everything in RAM is gone, flash stays.
func (d *Device) reboot() {
	d.mu.Lock()
	drop := d.powerOffLocked()
	d.stats.reboots++
	stopped := d.stopped
	d.mu.Unlock()
	drop()
	if !stopped {
		d.fleet.spawn(func(ctx context.Context) {
			if d.sleep(time.Second) {
				d.boot(ctx)
			}
		})
	}
}

// powerOffLocked forgets what is in RAM, and returns how to end what was connected.
func (d *Device) powerOffLocked() (drop func()) {
	drop = d.detachLocked()
	d.errored, d.playFrame = false, frameDuration
	d.sessionID, d.helloSeen, d.wsVersion = "", false, 1
	d.visionURL, d.visionToken = "", ""
	d.app, d.mode, d.upgrading = appIdle, "", false
	d.jobs, d.spare, d.audioQueue, d.restart = nil, nil, 0, d.looping
	return drop
}

// log writes one line for --log debug.
func (d *Device) log(what string, args ...any) {
	if log := d.fleet.options.Log; log != nil {
		log.Debug(what, append([]any{"device", d.id}, args...)...)
	}
}
