# syntax=docker/dockerfile:1

# Two images from one file:
#   docker build -t fleetd .                              the server (last stage, the default)
#   docker build -t fleetd-simulator --target simulator . virtual devices for trying it out
# Both are static binaries on an empty file system and run as an unprivileged user.

# The compiler runs on the builder's platform, whatever the image is for: docker buildx build --platform linux/amd64,linux/arm64 .
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS
ARG TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
# The image context has no repository, so `fleetd version` learns what it is from here:
#   docker build --build-arg VERSION=v0.1.0 --build-arg COMMIT=$(git rev-parse HEAD) .
ARG VERSION=dev
ARG COMMIT=unknown
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    export CGO_ENABLED=0 GOOS=${TARGETOS:-linux} GOARCH=${TARGETARCH:-} \
 && go build -trimpath -ldflags "-s -w -X main.linkedVersion=${VERSION} -X main.linkedCommit=${COMMIT}" -o /out/bin/fleetd ./cmd/fleetd \
 && go build -trimpath -ldflags "-s -w" -o /out/bin/simulator ./simulator
# What an empty file system lacks: roots for TLS towards Postgres and NATS, a place for temporary files, and a data
# directory that belongs to the user of the image (a fresh named volume takes over its owner).
RUN mkdir -p /out/root/data /out/root/tmp /out/root/etc/ssl/certs \
 && cp /etc/ssl/certs/ca-certificates.crt /out/root/etc/ssl/certs/ \
 && chmod 1777 /out/root/tmp && chmod 700 /out/root/data

FROM scratch AS simulator
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/bin/simulator /simulator
USER 65532:65532
ENTRYPOINT ["/simulator"]

FROM scratch
COPY --from=build --chown=65532:65532 /out/root/ /
COPY --from=build /out/bin/fleetd /fleetd
USER 65532:65532
# FLEETD_DATA_DIR also lets `docker exec <container> /fleetd devices` find the running node.
ENV FLEETD_DATA_DIR=/data
VOLUME /data
# 8000: devices (OTA, WebSocket, photos). 1883: MQTT, 8883: MQTT over TLS if there is a certificate, 8884/udp: audio.
# 8080: API, metrics; it listens on the container's loopback unless FLEETD_API_LISTEN is set.
EXPOSE 8000 1883 8883 8884/udp 8080
STOPSIGNAL SIGTERM
# --live: a node without its database or NATS still serves devices and must not be restarted for it. The command finds
# the node in FLEETD_DATA_DIR, whatever address its API has.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["/fleetd", "healthcheck", "--live"]
ENTRYPOINT ["/fleetd"]
CMD ["serve"]
