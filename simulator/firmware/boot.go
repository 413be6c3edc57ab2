package firmware

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	checkAttempts      = 10
	firstRetry         = 10 * time.Second
	activationRounds   = 10
	activationWait     = 3 * time.Second
	activationLongWait = 10 * time.Second
)

// boot is the activation task (main/application.cc:340-355, 417-509): check, activation, choice of transport. It runs
// once per start and ends with the first conversation.
func (d *Device) boot(ctx context.Context) {
	d.mu.Lock()
	d.bootedAt = time.Now()
	d.mu.Unlock()
	d.setLife(StateBooting, "")
	answer, err := d.checkNewVersion(ctx)
	switch {
	case ctx.Err() != nil:
		return
	case errors.Is(err, errRestarting):
		return
	case errors.Is(err, errHang):
		d.halt(StateHung, fmt.Errorf("ota_too_large: %w", err))
		return
	case errors.Is(err, errNVS), errors.Is(err, errStoi):
		d.halt(StateBootLoop, err)
		return
	}
	d.mu.Lock()
	endpoint := d.settings.text("mqtt", "endpoint")
	d.clock = answer.clock
	d.mu.Unlock()
	// MQTT wins when both are offered, and is the fallback when neither is (main/application.cc:502-509).
	if answer.mqtt || !answer.websocket {
		_, parseErr := parseEndpoint(endpoint)
		switch {
		case parseErr != nil:
			d.halt(StateBootLoop, parseErr)
			return
		case endpoint == "" && err != nil:
			d.halt(StateFailed, fmt.Errorf("gave up after %d OTA checks and fell back to MQTT without an endpoint: %w", checkAttempts, err))
			return
		case endpoint == "" && answer.mqtt:
			d.halt(StateNoEndpoint, errors.New("the OTA answer selects MQTT but names no endpoint: the device never connects"))
			return
		case endpoint == "":
			d.halt(StateNoEndpoint, errors.New("the OTA answer names no transport: the device falls back to MQTT without an endpoint and never connects"))
			return
		}
		d.setLife(StateIdle, "")
		d.startMQTT(ctx)
		d.arm()
		if d.fleet.options.Talk {
			d.wake()
		}
		return
	}
	d.setLife(StateIdle, "")
	d.arm()
	d.wake()
}

// errRestarting ends a boot that led to another one.
var errRestarting = errors.New("restarting")

// checkNewVersion is Application::CheckNewVersion with its retries and the activation loop.
func (d *Device) checkNewVersion(ctx context.Context) (otaAnswer, error) {
	failures, pause := 0, firstRetry
	for {
		answer, err := d.checkOnce(ctx)
		switch {
		case err == nil:
		case errors.Is(err, errHang), errors.Is(err, errNVS), errors.Is(err, errStoi):
			return answer, err
		default:
			d.note(err.Error())
			if failures++; failures >= checkAttempts || !d.sleep(pause) {
				return answer, err
			}
			pause *= 2
			continue
		}
		failures, pause = 0, firstRetry
		if answer.upgrade && d.upgrade(ctx, answer.firmwareURL, answer.firmware) {
			return answer, errRestarting
		}
		if !answer.hasCode && !answer.hasChallenge {
			return answer, nil
		}
		d.setLife(StateWaiting, "waits for activation, code "+answer.code)
		if !d.activate(ctx, answer) {
			return answer, ctx.Err()
		}
	}
}

// fetch sends the OTA check and returns the reply.
func (d *Device) fetch(ctx context.Context) ([]byte, error) {
	d.mu.Lock()
	d.stats.otaChecks++
	d.mu.Unlock()
	return fetchOTA(ctx, d.fleet.dialer, d.index, d.fleet.options.OTA, d.identity(), d.systemInfo().json())
}

func (d *Device) checkOnce(ctx context.Context) (otaAnswer, error) {
	body, err := d.fetch(ctx)
	if err != nil {
		return otaAnswer{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.problem = ""
	return readOTA(body, &d.settings, d.version)
}

// activate is one turn of the activation loop; false means that the simulation ends.
func (d *Device) activate(ctx context.Context, answer otaAnswer) bool {
	for range activationRounds {
		pause := activationLongWait
		if answer.hasChallenge {
			body := activationBody(d.serial, d.efuseKey(), answer.challenge)
			d.mu.Lock()
			d.stats.activations++
			d.mu.Unlock()
			status, err := postActivation(ctx, d.fleet.dialer, d.index, d.fleet.options.OTA, d.identity(), body)
			switch {
			case err == nil && status == 200:
				return true
			case err == nil && status == 202:
				pause = activationWait
			}
		}
		if !d.sleep(pause) {
			return false
		}
	}
	return true
}

// upgrade is Application::UpgradeFirmware: the open channel is closed first, the image needs a Content-Length, and
// success ends in a restart under the new version. A version the caller does not know stays as it is.
func (d *Device) upgrade(ctx context.Context, url, version string) bool {
	d.closeChannel()
	if !d.sleep(4 * time.Second) {
		return false
	}
	if _, err := d.get(ctx, url); err != nil {
		d.note("firmware upgrade failed: " + err.Error())
		d.sleep(3 * time.Second)
		return false
	}
	d.mu.Lock()
	if version != "" {
		d.version = version
	}
	d.stats.upgrades++
	d.mu.Unlock()
	d.reboot()
	return true
}

// get downloads url the way images and firmware are fetched and returns its length.
func (d *Device) get(ctx context.Context, url string) (int64, error) {
	call, err := openHTTP(ctx, d.fleet.dialer, d.index, "GET", url, nil, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = call.close() }()
	status, err := call.status()
	if err != nil {
		return 0, err
	}
	if status != 200 {
		return 0, toolError("Unexpected status code: " + strconv.Itoa(status))
	}
	return call.download()
}
