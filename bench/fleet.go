package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

// fleet is the devices of one run. A device is a number; its firmware is that number modulo the number of lists.
type fleet struct {
	address   string      // of the node's device side
	secure    *tls.Config // nil: without TLS
	transport string
	lists     [][]string
	logins    []firmware.Login
	channels  []*firmware.Audio // of devices that speak; nil for a fleet that does not

	mu    sync.Mutex
	conns []net.Conn
	live  sync.WaitGroup
	lost  atomic.Int64 // connections that ended before close
	ended atomic.Bool
}

// dialers is how many devices connect at the same time.
const dialers = 64

// busyChecks is how often a device that is asked to come later does so, as the firmware would.
const busyChecks = 30

var errBusy = errors.New("the node is busy")

func clientID(i int) string { return fmt.Sprintf("36c98363-3656-43cb-a00f-%012x", i) }

// Transports as metrics name them.
const (
	overWebSocket = "websocket"
	overMQTT      = "mqtt"
)

// otaPaths are the OTA addresses that pin a transport.
var otaPaths = map[string]string{overWebSocket: "/xiaozhi/ota/ws/", overMQTT: "/xiaozhi/ota/mqtt/"}

// newFleet makes n devices members, by the check that a device makes at boot; the answer gives its login.
func newFleet(ctx context.Context, d *daemon, transport string, n int, lists [][]string) (*fleet, error) {
	f := &fleet{address: d.device, secure: d.secure, transport: transport, lists: lists, logins: make([]firmware.Login, n)}
	return f, load.InParallel(16, n, func() (func(i int) error, func(), error) {
		c, err := f.dial(ctx, f.address, 0)
		if err != nil {
			return nil, nil, err
		}
		br := bufio.NewReaderSize(c, 8192)
		return func(i int) error {
			for left := busyChecks; ; left-- {
				if _, err := f.check(c, br, i); !errors.Is(err, errBusy) || left == 0 {
					return err
				}
				if err := rest(ctx, time.Second); err != nil {
					return err
				}
			}
		}, func() { _ = c.Close() }, nil
	})
}

// stage runs a daemon as the variant specifies, with a fleet that is to connect; end stops both. callable is as for load.ToolPages.
func (b *bench) stage(ctx context.Context, v variant, transport string, devices int, callable bool) (d *daemon, f *fleet, end func() error, err error) {
	lists, err := load.ToolLists(callable)
	if err != nil {
		return nil, nil, nil, err
	}
	d, stop, err := b.start(ctx, v)
	if err != nil {
		return nil, nil, nil, err
	}
	if f, err = newFleet(ctx, d, transport, devices, lists); err != nil {
		return nil, nil, nil, errors.Join(err, stop())
	}
	return d, f, func() error { return errors.Join(f.close(), stop()) }, nil
}

// bring connects devices, and waits until all are ready and everything about them is written.
func (f *fleet) bring(ctx context.Context, d *daemon, from, to int) error {
	if _, err := f.connect(ctx, from, to, true); err != nil {
		return err
	}
	return errors.Join(d.awaitReady(ctx, to, startLimit), d.awaitQuiet(ctx, startLimit))
}

// dial connects as device i.
func (f *fleet) dial(ctx context.Context, address string, i int) (net.Conn, error) {
	c, err := load.Dial(ctx, address, i)
	if err != nil || f.secure == nil {
		return c, err
	}
	return records{tls.Client(c, f.secure)}, nil // the first write shakes hands
}

// partitions are those of a device. Its slots have room for an image that takes a minute and firmwareSpread at firmwareRate.
const partitions = `{"label":"ota_0","type":0,"subtype":16,"address":131072,"size":6815744},{"label":"ota_1","type":0,"subtype":17,"address":6946816,"size":6815744},` +
	`{"label":"assets","type":1,"subtype":130,"address":13762560,"size":3014656}`

// check makes the OTA check of device i. image is the address of the image that the reply offers, if it offers one.
func (f *fleet) check(c net.Conn, br *bufio.Reader, i int) (image string, err error) {
	firmware := i % len(f.lists)
	body := fmt.Sprintf(`{"version":2,"language":"en-US","flash_size":16777216,"minimum_free_heap_size":"8318916","mac_address":"%s",`+
		`"uuid":"%s","chip_model_name":"esp32s3","chip_info":{"model":9,"cores":2,"revision":2,"features":18},`+
		`"application":{"name":"xiaozhi","version":"2.%d.0","compile_time":"Jul  9 2026T10:00:00Z","idf_version":"v5.5.2","elf_sha256":"%064x"},`+
		`"partition_table":[`+partitions+`],"ota":{"label":"ota_0"},"board":{"type":"bread-compact-wifi","name":"bread-compact-wifi","ssid":"bench","rssi":-50,`+
		`"channel":1,"ip":"127.0.0.1","mac":"%s"}}`, load.DeviceID(i), clientID(i), firmware, firmware+1, load.DeviceID(i))
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: bench\r\nDevice-Id: %s\r\nClient-Id: %s\r\nUser-Agent: bread-compact-wifi/2.%d.0\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", otaPaths[f.transport], load.DeviceID(i), clientID(i), firmware, len(body), body)
	if _, err := c.Write([]byte(request)); err != nil {
		return "", err
	}
	status, answer, err := load.ReadResponse(br)
	if err != nil {
		return "", fmt.Errorf("OTA check: %w", err)
	}
	switch status {
	case 200:
	case http.StatusServiceUnavailable:
		return "", fmt.Errorf("OTA check: %w: %.300q", errBusy, answer)
	default:
		return "", fmt.Errorf("OTA check: status %d, %.300q", status, answer)
	}
	reply, err := replyOf(f.transport, answer, i)
	f.logins[i] = reply.Login
	return reply.UpgradeURL, err
}

// connect brings devices from (included) to to (excluded) from dial to the last page of their tools, and returns how
// long each took. Live devices then go on answering; the others fall silent, which the daemon notices after a minute.
func (f *fleet) connect(ctx context.Context, from, to int, live bool) ([]time.Duration, error) {
	took := make([]time.Duration, to-from)
	err := load.InParallel(dialers, to-from, func() (func(i int) error, func(), error) {
		return func(i int) error {
			begun := time.Now()
			c, line, err := f.connectDevice(ctx, from+i)
			if err != nil {
				return fmt.Errorf("device %s: %w", load.DeviceID(from+i), err)
			}
			took[i] = time.Since(begun)
			return f.keep(c, line, live)
		}, func() {}, nil
	})
	return took, err
}

// keep notes a connection, and lets it answer if live.
func (f *fleet) keep(c net.Conn, line *firmware.Line, live bool) error {
	f.mu.Lock()
	f.conns = append(f.conns, c)
	f.mu.Unlock()
	if !live {
		return nil
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return err
	}
	f.live.Go(func() {
		load.AnswerCalls(line)
		if !f.ended.Load() {
			f.lost.Add(1)
		}
	})
	return nil
}

// drop ends all connections, so that the devices can come back.
func (f *fleet) drop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		_ = c.Close() // it served its purpose
	}
	f.conns = nil
}

// close ends all connections. An error means that some had ended before.
func (f *fleet) close() error {
	f.ended.Store(true)
	f.drop()
	f.live.Wait()
	if n := f.lost.Load(); n > 0 {
		return fmt.Errorf("%d devices lost their connection during the run", n)
	}
	return nil
}
