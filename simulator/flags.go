package main

import (
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// errUsage marks mistakes on the command line: exit status 2.
var errUsage = errors.New("wrong command line")

// options is the parsed command line.
type options struct {
	ota        string
	devices    int
	profiles   []*profile
	ramp       float64
	wake       time.Duration
	notify     time.Duration
	talk       bool
	talkFor    time.Duration
	faults     []faultRule
	slow       time.Duration
	late       time.Duration
	seed       uint64
	duration   time.Duration
	macBase    uint64
	reportJSON bool
	reportFile string
	quiet      bool
	insecure   bool
	caFile     string
	timeScale  float64
	maxCalls   int
	photoW     int
	photoH     int

	transport       string
	utterance       time.Duration
	reconnect       time.Duration
	reconnectJitter time.Duration
	subscribe       bool
	serial          string
	efuseKey        *[32]byte
	debug           bool
	attack          attackOptions
}

// parseFlags reads the arguments. flag.ErrHelp means that help was printed.
func parseFlags(args []string, stderr io.Writer) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("simulator", flag.ContinueOnError)
	// The flag package would print the whole help behind every typing mistake.
	fs.SetOutput(io.Discard)
	fs.StringVar(&o.ota, "ota", "http://127.0.0.1:8000/xiaozhi/ota/", "OTA `URL` the devices ask at boot")
	fs.IntVar(&o.devices, "devices", 3, "`number` of devices")
	fs.StringVar(&o.transport, "transport", "", "websocket or mqtt asks the /ws/ or /mqtt/ variant of a plain OTA URL; empty: the URL as it is. The answer decides")
	profiles := fs.String("profile", "fw-2.4", "comma separated `list` of fw-2.4, fw-2.1, fw-1.9, robot, dealt out in turn")
	ramp := fs.String("ramp", "", "devices started per second, as `N/s` or N; empty: 500/s")
	fs.DurationVar(&o.wake, "wake", 0, "a device without an open socket is woken about every `D`; 0: it connects once after boot and never again by itself")
	fs.DurationVar(&o.notify, "notify", 0, "each connected device sends the MCP notification notifications/button_pressed about every `D`")
	fs.BoolVar(&o.talk, "talk", false, "open conversations with listen messages and Opus frames of 60 ms")
	fs.DurationVar(&o.talkFor, "talk-for", 0, "with --talk: say listen stop after `D`; 0: keep streaming while the server lets the device listen")
	fs.DurationVar(&o.utterance, "utterance", 3*time.Second, "with --talk: each conversation begins with `D` of speech, then silence")
	fs.DurationVar(&o.reconnect, "reconnect", 10*time.Second, "an MQTT device comes back `D` after a loss, as esp-mqtt does")
	fs.DurationVar(&o.reconnectJitter, "reconnect-jitter", 0, "spread of --reconnect: up to `D` more")
	fs.StringVar(&o.serial, "serial", "", "eFuse serial `number` of the first device, which makes it prove itself at activation")
	key := fs.String("efuse-key", "", "eFuse KEY0 of the first device, 64 `hex` digits; empty: one that derives from the seed")
	fs.BoolVar(&o.subscribe, "subscribe", false, "SUBSCRIBE to mqtt.subscribe_topic, for plain brokers; the firmware never does")
	level := fs.String("log", "", "`level`: debug writes connections and conversations to standard error")
	o.attack.flags(fs)
	faults := fs.String("fault", "", "comma separated `list` of "+strings.Join(faultNames(), ", ")+"; name:N gives it to the first N devices only")
	fs.DurationVar(&o.slow, "slow", 3*time.Second, "delay `D` of the fault slow")
	fs.DurationVar(&o.late, "late", 40*time.Second, "delay `D` of the fault late-reply")
	fs.Uint64Var(&o.seed, "seed", 1, "`number` from which all random things derive")
	fs.DurationVar(&o.duration, "duration", 0, "stop after `D`; 0: at SIGINT or SIGTERM")
	mac := fs.String("mac-base", "02:f1:ee:00:00:00", "`MAC` of the first device, counted up for the others")
	report := fs.String("report", "", "`format` of the report on standard output at the end: json, or empty for a short text")
	fs.StringVar(&o.reportFile, "report-file", "", "write the JSON report to `PATH` as well")
	fs.BoolVar(&o.quiet, "quiet", false, "no progress lines on standard error")
	fs.BoolVar(&o.insecure, "insecure", false, "do not verify TLS certificates (a real device does)")
	fs.StringVar(&o.caFile, "ca", "", "PEM `file` with the roots to trust instead of the system's")
	fs.Float64Var(&o.timeScale, "time-scale", 1, "`factor` on every pause of the firmware (retries, activation, reboot); 0.01 in tests")
	fs.IntVar(&o.maxCalls, "max-calls-recorded", 100_000, "`number` of tool calls listed in the report, over all devices")
	photo := fs.String("photo-size", "320x240", "camera picture in pixels, `WxH`")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			_, _ = io.WriteString(stderr, "Usage: go run ./simulator [flags]\n\nVirtual xiaozhi-esp32 devices, written from the firmware.\n\nFlags (one dash or two):\n")
			fs.SetOutput(stderr)
			fs.PrintDefaults()
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	if err := o.burn(*key); err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	if err := o.resolve(fs.Args(), *profiles, *ramp, *faults, *mac, *report, *photo, *level); err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	return o, nil
}

// burn reads the eFuse key.
func (o *options) burn(key string) error {
	if key == "" {
		return nil
	}
	b, err := hex.DecodeString(key)
	if err != nil || len(b) != 32 {
		return errors.New("--efuse-key: 64 hex digits")
	}
	o.efuseKey = (*[32]byte)(b)
	return nil
}

// resolve checks the flags and turns their texts into values.
func (o *options) resolve(rest []string, profiles, ramp, faults, mac, report, photo, level string) error {
	if len(rest) > 0 {
		return fmt.Errorf("unexpected argument %q; every setting is a flag", rest[0])
	}
	var err error
	if o.profiles, err = newCatalog().pick(profiles); err != nil {
		return err
	}
	if o.faults, err = parseFaults(faults); err != nil {
		return err
	}
	if o.macBase, err = parseMAC(mac); err != nil {
		return fmt.Errorf("--mac-base: %w", err)
	}
	o.ramp = 500
	if ramp != "" {
		o.ramp, err = strconv.ParseFloat(strings.TrimSuffix(ramp, "/s"), 64)
		if err != nil || o.ramp <= 0 {
			return fmt.Errorf("--ramp: %q is not a rate like 100/s", ramp)
		}
	}
	switch report {
	case "", "text":
	case "json":
		o.reportJSON = true
	default:
		return fmt.Errorf("--report: %q is unknown; known is json", report)
	}
	switch level {
	case "":
	case "debug":
		o.debug = true
	default:
		return fmt.Errorf("--log: %q is unknown; known is debug", level)
	}
	if _, err := fmt.Sscanf(photo, "%dx%d", &o.photoW, &o.photoH); err != nil || o.photoW < 16 || o.photoH < 16 || o.photoW > 1600 || o.photoH > 1600 {
		return fmt.Errorf("--photo-size: %q is not a size like 320x240, sides from 16 to 1600", photo)
	}
	switch {
	case o.devices < 1:
		return errors.New("--devices: at least 1")
	case !(o.timeScale > 0):
		return errors.New("--time-scale: above 0")
	case o.utterance < 0 || o.reconnect < 0 || o.reconnectJitter < 0:
		return errors.New("--utterance, --reconnect and --reconnect-jitter: not below 0")
	case o.maxCalls < 0:
		return errors.New("--max-calls-recorded: not below 0")
	}
	if err := o.attack.resolve(); err != nil {
		return err
	}
	return o.pinTransport()
}

// pinTransport picks the variant of a plain OTA URL that offers one transport only.
func (o *options) pinTransport() error {
	u, err := url.Parse(o.ota)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("--ota: %q is not an http or https URL", o.ota)
	}
	variant := ""
	switch o.transport {
	case "":
		return nil
	case "websocket":
		variant = "ws/"
	case "mqtt":
		variant = "mqtt/"
	default:
		return fmt.Errorf("--transport: %q is unknown; known are websocket and mqtt", o.transport)
	}
	if strings.HasSuffix(u.Path, "/xiaozhi/ota/") {
		u.Path += variant
		o.ota = u.String()
	}
	return nil
}

// sockets is how many sockets a device holds at a time: MQTT devices in conversation have one for audio as well.
func (o *options) sockets() int {
	if o.transport == "mqtt" && (o.talk || o.wake > 0) {
		return 2
	}
	return 1
}
