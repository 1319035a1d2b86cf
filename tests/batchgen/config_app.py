"""The smallest Hydra app over the job's configuration: a program that says where a job would go."""

import hydra
from omegaconf import DictConfig

from batchgen.config import load_config


@hydra.main(config_path="pkg://batchgen.conf", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> None:
    print("DIR", load_config(cfg).output.dir)


if __name__ == "__main__":
    main()
