package mqttdevice_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest/client"
	"fleetd/simulator/firmware"
)

// connect logs in to a server or broker. With subscribe, it subscribes to the topic
// down, as stock firmware never does.
func connect(address string, login firmware.Login, id devices.ID, subscribe bool) (*client.Client, error) {
	login.Endpoint, login.PublishTopic = strings.TrimPrefix(address, "tcp://"), devices.TopicUp(id)
	if subscribe {
		login.SubscribeTopic = devices.TopicDown(id)
	}
	return client.Dial(login)
}

const hello = client.HelloMQTT

// lines is a log that tests can read concurrently.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }
