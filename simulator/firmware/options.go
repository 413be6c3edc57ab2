// Package firmware is a xiaozhi-esp32 device on the wire, written from the firmware's source: v2.4.2, with v2.2.6, v2.1.0
// and v1.9.4 where they differ. Comments name the file that a behaviour follows. It shares no code with the server, so that
// the two can disagree: what the server writes is judged by what the device makes of it.
//
// A Fleet is many whole devices: New, Run, Report, Close. A Login and its Line are the transport alone, for a caller that
// decides what the device sends. A Flash reads OTA replies, and is how tests ask whether a device survives one.
package firmware

import (
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Options say which devices a Fleet has, and how they behave. Begin with Defaults. Errors name an option as its flag is
// named.
type Options struct {
	OTA       string     // URL that the devices ask at boot
	Devices   int        // how many; clones come on top
	Profiles  []*Profile // dealt out in turn
	Faults    []FaultRule
	Ramp      float64 // devices started per second
	Transport string  // "websocket" or "mqtt" requests the variant of a plain OTA URL that offers only this one
	Seed      uint64  // from which all random things derive
	MACBase   uint64  // address of the first device; the others count up

	Wake      time.Duration // a device without an open channel is woken about that often; 0: once after its boot
	Away      Away          // absences; zero: none
	Notify    time.Duration // a connected device sends a notification about that often; 0: never
	Talk      bool          // conversations with audio
	TalkFor   time.Duration // press-to-talk: the button is released after that; 0: no button
	Utterance time.Duration // of speech, at the beginning of each conversation

	Reconnect       time.Duration // pause before an MQTT device connects again
	ReconnectJitter time.Duration // at most so much more
	Subscribe       bool          // SUBSCRIBE to mqtt.subscribe_topic, which the firmware never does
	Serial          string        // eFuse serial number of the first device; empty: that of its profile
	EfuseKey        *[32]byte     // eFuse KEY0 of the first device; nil: it derives from the seed
	Slow, Late      time.Duration // delays of the faults slow and late-reply

	Insecure                bool    // TLS certificates are not verified
	CA                      string  // PEM file with the roots to trust; empty: the system's
	TimeScale               float64 // factor on every pause of the firmware
	MaxCalls                int     // tool calls that the report lists, over all devices
	PhotoWidth, PhotoHeight int     // of the camera, in pixels

	Log *slog.Logger // connections and conversations, at level debug; nil: none
}

// Defaults are three devices of the newest firmware that ask a node on this machine.
func Defaults() Options {
	return Options{OTA: "http://127.0.0.1:8000/xiaozhi/ota/", Devices: 3, Profiles: profiles()[:1], Ramp: 500, Seed: 1, MACBase: 0x02f1ee000000,
		Utterance: 3 * time.Second, Reconnect: 10 * time.Second, Slow: 3 * time.Second, Late: 40 * time.Second,
		TimeScale: 1, MaxCalls: 100_000, PhotoWidth: 320, PhotoHeight: 240}
}

// Flags defines a flag for each option, with the option's value as its default. Call read after the flags are parsed: it
// reads those that are texts, and checks all.
func (o *Options) Flags(fs *flag.FlagSet) (read func() error) {
	fs.StringVar(&o.OTA, "ota", o.OTA, "OTA `URL` the devices ask at boot")
	fs.IntVar(&o.Devices, "devices", o.Devices, "`number` of devices")
	fs.StringVar(&o.Transport, "transport", o.Transport, "websocket or mqtt requests the /ws/ or /mqtt/ variant of a plain OTA URL; empty: the URL as it is. The answer decides")
	profiles := fs.String("profile", "fw-2.4", "comma separated `list` of "+strings.Join(profiles().names(), ", ")+", dealt out in turn")
	ramp := fs.String("ramp", "", "devices started per second, as `N/s` or N; empty: 500/s")
	fs.DurationVar(&o.Wake, "wake", o.Wake, "a device without an open socket is woken about every `D`; 0: it connects once after boot and never again by itself")
	away := fs.String("away", "", "each device is without power for a part of a period, such as `30s/2m`, one device after the other")
	fs.DurationVar(&o.Notify, "notify", o.Notify, "each connected device sends the MCP notification notifications/button_pressed about every `D`")
	fs.BoolVar(&o.Talk, "talk", o.Talk, "open conversations with listen messages and Opus frames of 60 ms")
	fs.DurationVar(&o.TalkFor, "talk-for", o.TalkFor, "with --talk: say listen stop after `D`; 0: keep streaming while the server lets the device listen")
	fs.DurationVar(&o.Utterance, "utterance", o.Utterance, "with --talk: each conversation begins with `D` of speech, then silence")
	fs.DurationVar(&o.Reconnect, "reconnect", o.Reconnect, "an MQTT device comes back `D` after a loss, as esp-mqtt does")
	fs.DurationVar(&o.ReconnectJitter, "reconnect-jitter", o.ReconnectJitter, "spread of --reconnect: up to `D` more")
	fs.StringVar(&o.Serial, "serial", o.Serial, "eFuse serial `number` of the first device, which makes it sign the challenge at activation")
	key := fs.String("efuse-key", "", "eFuse KEY0 of the first device, 64 `hex` digits; empty: one that derives from the seed")
	fs.BoolVar(&o.Subscribe, "subscribe", o.Subscribe, "SUBSCRIBE to mqtt.subscribe_topic, for plain brokers; the firmware never does")
	faults := fs.String("fault", "", "comma separated `list` of "+strings.Join(FaultNames(), ", ")+"; name:N gives it to the first N devices only")
	fs.DurationVar(&o.Slow, "slow", o.Slow, "delay `D` of the fault slow")
	fs.DurationVar(&o.Late, "late", o.Late, "delay `D` of the fault late-reply")
	fs.Uint64Var(&o.Seed, "seed", o.Seed, "`number` from which all random things derive")
	mac := fs.String("mac-base", formatMAC(o.MACBase), "`MAC` of the first device, counted up for the others")
	fs.BoolVar(&o.Insecure, "insecure", o.Insecure, "do not verify TLS certificates (a real device does)")
	fs.StringVar(&o.CA, "ca", o.CA, "PEM `file` with the roots to trust instead of the system's")
	fs.Float64Var(&o.TimeScale, "time-scale", o.TimeScale, "`factor` on every pause of the firmware (retries, activation, reboot); 0.01 in tests")
	fs.IntVar(&o.MaxCalls, "max-calls-recorded", o.MaxCalls, "`number` of tool calls listed in the report, over all devices")
	photo := fs.String("photo-size", fmt.Sprintf("%dx%d", o.PhotoWidth, o.PhotoHeight), "camera picture in pixels, `WxH`")
	return func() (err error) {
		if o.Profiles, err = ParseProfiles(*profiles); err != nil {
			return fmt.Errorf("--profile: %w", err)
		}
		if o.Faults, err = ParseFaults(*faults); err != nil {
			return fmt.Errorf("--fault: %w", err)
		}
		if o.MACBase, err = parseMAC(*mac); err != nil {
			return fmt.Errorf("--mac-base: %w", err)
		}
		if *ramp != "" {
			if o.Ramp, err = strconv.ParseFloat(strings.TrimSuffix(*ramp, "/s"), 64); err != nil || o.Ramp <= 0 {
				return fmt.Errorf("--ramp: %q is not a rate like 100/s", *ramp)
			}
		}
		if o.Away, err = parseAway(*away); err != nil {
			return fmt.Errorf("--away: %w", err)
		}
		if *key != "" {
			b, err := hex.DecodeString(*key)
			if err != nil || len(b) != 32 {
				return errors.New("--efuse-key: 64 hex digits")
			}
			o.EfuseKey = (*[32]byte)(b)
		}
		if _, err := fmt.Sscanf(*photo, "%dx%d", &o.PhotoWidth, &o.PhotoHeight); err != nil {
			return fmt.Errorf("--photo-size: %q is not a size like 320x240", *photo)
		}
		return o.check()
	}
}

// check reports what is wrong with the options, and applies Transport to the OTA URL.
func (o *Options) check() error {
	switch {
	case o.Devices < 1:
		return errors.New("--devices: at least 1")
	case len(o.Profiles) == 0:
		return errors.New("--profile: at least one")
	case !(o.Ramp > 0):
		return errors.New("--ramp: above 0")
	case !(o.TimeScale > 0):
		return errors.New("--time-scale: above 0")
	case o.Utterance < 0 || o.Reconnect < 0 || o.ReconnectJitter < 0:
		return errors.New("--utterance, --reconnect and --reconnect-jitter: not below 0")
	case o.MaxCalls < 0:
		return errors.New("--max-calls-recorded: not below 0")
	case o.PhotoWidth < 16 || o.PhotoHeight < 16 || o.PhotoWidth > 1600 || o.PhotoHeight > 1600:
		return fmt.Errorf("--photo-size: %dx%d is not a size like 320x240, sides from 16 to 1600", o.PhotoWidth, o.PhotoHeight)
	}
	return o.pinTransport()
}

// pinTransport picks the variant of a plain OTA URL that offers one transport only.
func (o *Options) pinTransport() error {
	u, err := url.Parse(o.OTA)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("--ota: %q is not an http or https URL", o.OTA)
	}
	variant := ""
	switch o.Transport {
	case "":
		return nil
	case transportWebSocket:
		variant = "ws/"
	case transportMQTT:
		variant = "mqtt/"
	default:
		return fmt.Errorf("--transport: %q is unknown; known are websocket and mqtt", o.Transport)
	}
	if strings.HasSuffix(u.Path, "/xiaozhi/ota/") {
		u.Path += variant
		o.OTA = u.String()
	}
	return nil
}

// Transports, as reports name them.
const (
	transportWebSocket = "websocket"
	transportMQTT      = "mqtt"
)

// sockets is how many sockets a device holds at a time: MQTT devices in conversation have one for audio as well.
func (o *Options) sockets() int {
	if o.Transport == transportMQTT && (o.Talk || o.Wake > 0) {
		return 2
	}
	return 1
}
